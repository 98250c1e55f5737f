# SPDX-License-Identifier: Apache-2.0
"""The desired content of the maps about a node: devices and settings."""

from ipaddress import ip_address, ip_network

from ebpflb.entries import services
from ebpflb.entries.services import NO_PREFIX, NO_V6, Settings, prefix_of
from ebpflb.model.addresses import Family
from ebpflb.model.devices import Device, LocalDetector, LocalMode
from ebpflb.plan.desired import DesiredNode

V4 = ip_address("192.0.2.1")
ETH = Device(2, "eth0", False, True, 0, (V4,), (V4,))
VETH = Device(3, "veth1", False, True, 0, (), ())
HOST_ONLY = frozenset({"host_only"})
CHOSEN = Settings(flags=frozenset({"guard_nodeports"}), first_port=1, last_port=2)
SPAN = {Family.IPV4: prefix_of(ip_network("10.96.0.0/16"))}


def local(detector: LocalDetector, *pod_cidrs: str) -> DesiredNode:
    networks = tuple(map(ip_network, pod_cidrs))
    return DesiredNode((ETH, VETH), (VETH,), {Family.IPV4: V4}, detector, networks)


def test_only_served_devices_are_there() -> None:
    """Only served devices are in the map, with all addresses; a family without an address is
    unspecified.
    """
    by_prefix = LocalDetector(LocalMode.NAME_PREFIX, name_prefix="veth")
    assert local(LocalDetector()).devices() == {3: services.DeviceEntry(V4, NO_V6, HOST_ONLY)}
    assert local(by_prefix).devices()[3].flags == {"pods", "host_only"}


def test_ports_and_their_frames() -> None:
    """A bridge's port is marked as such. The MAC addresses of all devices except loopback are in
    the map, whether or not they are served.
    """
    lo = Device(1, "lo", True, True, 0, (), (), mac="00:00:00:00:00:00")
    tun = Device(3, "tun0", False, False, 0, (), ())
    bridge = Device(4, "br0", False, True, 0, (), (), "bridge", mac="02:00:00:00:00:04")
    port = Device(5, "v", False, True, 4, (), (), mac="02:00:00:00:00:05")
    node = DesiredNode((lo, tun, bridge, port), (port,), {}, LocalDetector(), ())
    assert node.devices()[5].flags == {"bridged"}
    assert node.link_addresses() == {bridge.mac: 1, port.mac: 1}


def test_ports_without_programs() -> None:
    """Whether a bridge has ports that are not served is marked."""
    bridge = Device(4, "br0", False, True, 0, (), (), "bridge")
    one, other = (Device(at, f"v{at}", False, True, 4, (), ()) for at in (5, 6))
    for served, marks in (((one, other), {"master", "all_ports"}), ((one,), {"master"}), ((), {})):
        node = DesiredNode((bridge, one, other), (bridge, *served), {}, LocalDetector(), ())
        assert node.devices()[4].flags == {"host_only", *marks}


def test_settings_without_detector() -> None:
    """The settings have the operator's fields, the node's own and the covering prefixes, but no
    pods.
    """
    assert local(LocalDetector()).settings(CHOSEN, SPAN) == CHOSEN._replace(
        span_v4=SPAN[Family.IPV4], node_v4=V4
    )


def test_settings_with_detector() -> None:
    """If pods of one family are known the detector is on, and the other family has no pods."""
    found = local(LocalDetector(LocalMode.NODE_CIDR), "10.244.1.0/24").settings(CHOSEN, {})
    assert found.flags == {"guard_nodeports", "detect_local"}
    assert found.pods_v4 == prefix_of(ip_network("10.244.1.0/24"))
    assert found.pods_v6 == found.span_v4 == NO_PREFIX
