# SPDX-License-Identifier: Apache-2.0
"""Which traffic comes from pods, in each mode of kube-proxy (kube-proxy.md 5.2)."""

from ipaddress import ip_network

import pytest

from ebpflb.model.devices import Device, LocalDetector, LocalMode

CLUSTER, NODE = (ip_network("10.244.0.0/16"),), (ip_network("10.244.1.0/24"),)
BRIDGE = Device(3, "cni0", False, True, 0, (), ())
PORT = Device(4, "veth1", False, True, 3, (), ())
OTHER = Device(5, "eth0", False, True, 0, (), ())
KNOWN = {device.index: device for device in (BRIDGE, PORT, OTHER)}


def pods(detector: LocalDetector) -> list[str]:
    return [device.name for device in KNOWN.values() if detector.is_pod_device(device, KNOWN)]


def test_without_a_cidr_nothing_is_a_pods() -> None:
    """Without a cluster CIDR no traffic counts as a pod's."""
    assert not LocalDetector().networks(NODE)
    assert not LocalDetector().by_device
    assert not pods(LocalDetector())


@pytest.mark.parametrize(
    ("mode", "networks"),
    [
        (LocalMode.CLUSTER_CIDR, CLUSTER),
        (LocalMode.NODE_CIDR, NODE),
        (LocalMode.BRIDGE, ()),
        (LocalMode.NAME_PREFIX, ()),
    ],
)
def test_each_mode_uses_its_own_cidrs(mode: LocalMode, networks: tuple[object, ...]) -> None:
    detector = LocalDetector(mode, CLUSTER, "cni0", "veth")
    assert detector.networks(NODE) == networks
    assert detector.by_device == (not networks)


def test_traffic_of_the_bridge_counts() -> None:
    """In mode BridgeInterface, traffic of the bridge and its ports comes from pods."""
    assert pods(LocalDetector(LocalMode.BRIDGE, bridge="cni0")) == ["cni0", "veth1"]


@pytest.mark.parametrize(
    ("prefix", "names"), [("veth", ["veth1"]), ("cni", ["cni0", "veth1"]), ("th", [])]
)
def test_name_prefix(prefix: str, names: list[str]) -> None:
    """In mode InterfaceNamePrefix, traffic of devices with the prefix, and of their ports, comes
    from pods.
    """
    assert pods(LocalDetector(LocalMode.NAME_PREFIX, name_prefix=prefix)) == names


def test_other_modes_go_by_source() -> None:
    """Other modes ignore a bridge and go by the source address."""
    assert not pods(
        LocalDetector(LocalMode.CLUSTER_CIDR, CLUSTER, bridge="cni0", name_prefix="veth")
    )
