# SPDX-License-Identifier: Apache-2.0
"""The desired content of the maps about a node: devices and settings."""

from ipaddress import ip_address, ip_network
from typing import Any

from ebpflb.model.addresses import Family
from ebpflb.model.devices import Device, LocalDetector, LocalMode
from ebpflb.model.neighbours import LearnedPort, Neighbour, Neighbourhood
from ebpflb.plan import entries
from ebpflb.plan.desired import DesiredNode
from ebpflb.plan.entries import NO_PREFIX, NO_V4, NO_V6, PodDevice, prefix_of

V4 = ip_address("192.0.2.1")
ETH = Device(2, "eth0", False, True, 0, (V4,), (V4,))
VETH = Device(3, "veth1", False, True, 0, (), ())
HOST_ONLY = frozenset({"host_only"})
CHOSEN: dict[str, Any] = {"flags": frozenset({"guard_nodeports"}), "first_port": 1, "last_port": 2}
SPAN = {Family.IPV4: prefix_of(ip_network("10.96.0.0/16"))}


def local(detector: LocalDetector, *pod_cidrs: str) -> DesiredNode:
    networks = tuple(map(ip_network, pod_cidrs))
    return DesiredNode((ETH, VETH), (VETH,), {Family.IPV4: V4}, detector, networks)


def test_devices() -> None:
    """Served devices alone, with the addresses of all; a family without one is unspecified."""
    by_prefix = LocalDetector(LocalMode.NAME_PREFIX, name_prefix="veth")
    assert local(LocalDetector()).devices() == {3: entries.DeviceEntry(V4, NO_V6, HOST_ONLY)}
    assert local(by_prefix).devices()[3].flags == {"pods", "host_only"}


def test_a_master() -> None:
    """A bridge is known as one while a port of it is served."""
    bridge, port = Device(4, "cni0", False, True, 0, (), ()), Device(5, "v", False, True, 4, (), ())
    for served, words in (((bridge, port), {"host_only", "master"}), ((bridge,), {"host_only"})):
        node = DesiredNode((bridge, port), served, {}, LocalDetector(), ())
        assert node.devices()[4].flags == words


def test_ports_and_their_frames() -> None:
    """A port of a bridge is known as one, and so are the MAC addresses of all devices but loopback,
    served or not.
    """
    lo = Device(1, "lo", True, True, 0, (), (), mac="00:00:00:00:00:00")
    tun = Device(3, "tun0", False, False, 0, (), ())
    bridge = Device(4, "br0", False, True, 0, (), (), "bridge", mac="02:00:00:00:00:04")
    port = Device(5, "v", False, True, 4, (), (), mac="02:00:00:00:00:05")
    node = DesiredNode((lo, tun, bridge, port), (port,), {}, LocalDetector(), ())
    assert node.devices()[5].flags == {"bridged"}
    assert node.link_addresses() == {bridge.mac: 1, port.mac: 1}


def test_settings_without_detector() -> None:
    """The operator's fields, the node's own and the covering prefixes; there are no pods."""
    assert local(LocalDetector()).settings(CHOSEN, SPAN) == CHOSEN | {
        "pods_v4": NO_PREFIX,
        "pods_v6": NO_PREFIX,
        "span_v4": SPAN[Family.IPV4],
        "span_v6": NO_PREFIX,
        "node_v4": V4,
        "node_v6": NO_V6,
    }


def test_settings_with_detector() -> None:
    """With a detector for pods of one family, the detector is on, and the other has no pods."""
    found = local(LocalDetector(LocalMode.NODE_CIDR), "10.244.1.0/24").settings(CHOSEN, {})
    assert found["flags"] == {"guard_nodeports", "detect_local"}
    assert found["pods_v4"] == prefix_of(ip_network("10.244.1.0/24"))
    assert found["pods_v6"] == found["span_v4"] == NO_PREFIX


def test_detector_by_device() -> None:
    """A mode that goes by devices is on before any of them is there."""
    found = local(LocalDetector(LocalMode.BRIDGE, bridge="cni0")).settings(CHOSEN, {})
    assert "detect_local" in found["flags"]
    assert found["pods_v4"] == NO_PREFIX


def test_node_without_address() -> None:
    """A node without an address gets none."""
    alone = DesiredNode((VETH,), (VETH,), {}, LocalDetector(), ())
    assert alone.devices()[3] == entries.DeviceEntry(NO_V4, NO_V6, HOST_ONLY)
    assert alone.settings(CHOSEN, {})["node_v4"] == NO_V4


# Ways into pods, for --fast-forward.

POD, OTHER_POD = ip_address("10.244.1.5"), ip_address("fd00:244:1::5")
MAC, BRIDGE_MAC = "02:00:00:00:00:55", "02:00:00:00:00:04"
BRIDGE = Device(4, "cni0", False, True, 0, (), (), "bridge", mac=BRIDGE_MAC, mtu=1450)
PORT = Device(5, "v5", False, True, 4, (), (), "veth", mtu=1500, leads_to_pod=True)
ROUTED = Device(
    6, "v6", False, True, 0, (), (), "veth", mac="02:00:00:00:00:06", mtu=1500, leads_to_pod=True
)
CLOSED = Device(7, "v7", False, True, 0, (), (), "veth", mac="02:00:00:00:00:07", mtu=1500)


def ways(*neighbours: Neighbour, ports: tuple[LearnedPort, ...] = (), most: int = 9) -> Any:
    around = Neighbourhood(frozenset(neighbours), frozenset(ports))
    known = (ETH, BRIDGE, PORT, ROUTED, CLOSED)
    return DesiredNode(known, (), {}, LocalDetector(), (), (), around).pod_devices(most)


def test_way_into_a_routed_pod() -> None:
    """Its frames come from the node's end of its veth; the route's MTU counts if it is smaller."""
    assert ways(Neighbour(POD, 6, MAC), Neighbour(OTHER_POD, 6, MAC, 1400)) == {
        POD: PodDevice(6, 1500, MAC, ROUTED.mac),
        OTHER_POD: PodDevice(6, 1400, MAC, ROUTED.mac),
    }


def test_way_into_a_pod_on_a_bridge() -> None:
    """Through the port behind which the bridge has seen its MAC address, from the bridge's."""
    at_port = LearnedPort(4, MAC, 5)
    assert ways(Neighbour(POD, 4, MAC), ports=(at_port,)) == {
        POD: PodDevice(5, 1450, MAC, BRIDGE_MAC)
    }
    for other in (LearnedPort(4, BRIDGE_MAC, 5), LearnedPort(8, MAC, 5), LearnedPort(4, MAC, 2)):
        assert ways(Neighbour(POD, 4, MAC), ports=(other,)) == {}


def test_no_way() -> None:
    """Neither to other hosts nor by a device that does not lead into a pod, or is gone."""
    assert ways(Neighbour(V4, 2, MAC), Neighbour(POD, 7, MAC), Neighbour(OTHER_POD, 9, MAC)) == {}
    assert len(ways(Neighbour(POD, 6, MAC), Neighbour(OTHER_POD, 6, MAC), most=1)) == 1
