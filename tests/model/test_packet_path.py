# SPDX-License-Identifier: Apache-2.0
"""The engine that translates new flows of packets, and the reason."""

from ipaddress import ip_address, ip_network

import pytest
from msgspec.structs import replace

from ebpflb.errors import NodeError
from ebpflb.model import packet_path
from ebpflb.model.addresses import Family
from ebpflb.model.devices import Device
from ebpflb.model.packet_path import Engine, PacketMark, decide, unsuited


@pytest.mark.parametrize(
    ("chosen", "missing", "unsuited", "engine", "reason"),
    [
        ("auto", None, None, Engine.NETFILTER, "NAT works"),
        ("auto", "no nf_tables", None, Engine.FLOWS, "no nf_tables"),
        ("auto", None, "a bridge", Engine.FLOWS, "a bridge"),
        ("auto", "no nf_tables", "a bridge", Engine.FLOWS, "no nf_tables"),
        ("flows", None, None, Engine.FLOWS, "--packet-path"),
        ("netfilter", None, None, Engine.NETFILTER, "--packet-path"),
        ("netfilter", None, "a bridge", Engine.NETFILTER, "although a bridge"),
    ],
)
def test_auto_takes_netfilter_where_it_works(
    chosen: str, missing: str | None, unsuited: str | None, engine: Engine, reason: str
) -> None:
    """auto chooses netfilter unless it cannot work, or should not be used, on this node."""
    path = decide(chosen, missing=missing, unsuited=unsuited)
    assert path.engine == engine
    assert reason in path.reason


def test_netfilter_that_cannot_work() -> None:
    """A chosen engine that cannot work is an error, not replaced by another."""
    with pytest.raises(NodeError, match=r"--packet-path=netfilter cannot work.*no nf_tables"):
        decide("netfilter", missing="no nf_tables")


# How --packet-mark is written.


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("", packet_path.OFF),
        ("0x4000/0x4000", PacketMark(0x4000, 0x4000)),
        ("16384/0xffff", PacketMark(0x4000, 0xFFFF)),
        ("1", PacketMark(1, 0xFFFFFFFF)),
        ("1/1", PacketMark(1, 1)),
    ],
)
def test_a_mark_has_two_forms(text: str, mark: PacketMark) -> None:
    """The forms are MARK/MASK in any base, or only MARK, as for iptables; one form is shown."""
    assert packet_path.parse_mark(text) == mark
    assert packet_path.parse_mark(str(mark)) == mark


@pytest.mark.parametrize("text", ["x", "1/", "/1", "2/1", "0/1", "0x100000000", "-1", "1/0"])
def test_a_mark_outside_its_mask_is_refused(text: str) -> None:
    """A mark is refused if it has bits outside its mask, or none."""
    with pytest.raises(ValueError, match=r"MARK/MASK|MARK must"):
        packet_path.parse_mark(text)


# Pods on one bridge, whose answers netfilter sees only with br_netfilter.


def device(index: int, name: str, kind: str, *own: str, master: int = 0) -> Device:
    found = tuple(map(ip_address, own))
    return Device(index, name, False, True, master, found, found, kind)


PODS = (ip_network("10.244.0.0/16"), ip_network("fd00:244::/32"))
ETH = device(2, "eth0", "", "192.0.2.1")
BRIDGE = device(3, "cni0", "bridge", "10.244.1.1")
PORT = replace(device(4, "veth1", "veth", master=3), hairpin=True)
ROUTED = device(5, "cali1", "veth")
DOCKER = device(6, "docker0", "bridge", "172.17.0.1")
CONTAINER = replace(device(7, "veth2", "veth", master=6), hairpin=True)
UPLINK = device(8, "br0", "bridge", "192.0.2.9")
WIRE = device(9, "eth1", "", master=8)
NEVER, ALWAYS = dict.fromkeys(Family, False), dict.fromkeys(Family, True)


@pytest.mark.parametrize(
    "others",
    [
        (ETH, ROUTED),
        (ETH, BRIDGE),
        (ETH, DOCKER, CONTAINER),
        (UPLINK, WIRE),
        (BRIDGE, replace(PORT, master=6)),
    ],
    ids=["routed", "no pod yet", "docker", "uplink", "elsewhere"],
)
def test_nodes_without(others: tuple[Device, ...]) -> None:
    """Routed pods, a bridge without pods, and bridges that are not for pods are no obstacle."""
    assert unsuited(others, PODS, NEVER) is None


def test_br_netfilter() -> None:
    """With br_netfilter for all families of the bridge's pods there is no obstacle."""
    only_v4 = {Family.IPV4: True, Family.IPV6: False}
    both = replace(BRIDGE, sources=tuple(map(ip_address, ("10.244.1.1", "fd00:244:1::1"))))
    assert unsuited((BRIDGE, PORT), PODS, ALWAYS) is None
    assert unsuited((BRIDGE, PORT), PODS, only_v4) is None
    found = unsuited((both, PORT), PODS, only_v4)
    assert found is not None
    assert "net.bridge.bridge-nf-call-ip6tables=1)" in found
    assert "nf-call-iptables" not in found


OTHERS = ["docker0", "docker_gwbridge", "br-0123456789ab", "virbr0", "podman1", "cni-podman0"]


@pytest.mark.parametrize("name", OTHERS)
def test_bridges_of_other_programs(name: str) -> None:
    """Bridges with pods are recognized by the pods' networks, whatever their names.

    If the networks are unknown, Docker's and libvirt's bridges are recognized by their names.
    """
    docker = replace(DOCKER, name=name)
    bare = replace(docker, addresses=(), sources=())
    assert unsuited((docker, CONTAINER), (), NEVER) is None
    assert unsuited((bare, CONTAINER), PODS, NEVER) is None
    assert unsuited((replace(BRIDGE, name=name), PORT), PODS, NEVER)


def test_a_port_without_hairpin_mode() -> None:
    """With br_netfilter a pod at such a port cannot reach itself; the flow tables serve it."""
    plain = replace(PORT, hairpin=False)
    others = (ETH, replace(WIRE, master=BRIDGE.index), PORT, ROUTED)
    assert unsuited((BRIDGE, *others), PODS, ALWAYS) is None
    found = unsuited((BRIDGE, *others, plain), PODS, ALWAYS)
    assert found == (
        "a pod at veth1 on the bridge cni0 cannot reach itself through a Service without hairpin "
        "mode on its port (hairpinMode of the CNI; ip link set veth1 type bridge_slave hairpin on)"
    )
    again = replace(plain, index=9, name="veth9")
    found = unsuited((BRIDGE, plain, again), PODS, ALWAYS)
    assert found is not None
    assert found.startswith("a pod at veth1 and 1 more on the bridge cni0")


def test_ports_that_are_left_out() -> None:
    """If the bridge hands packets to netfilter at its ports, the ports need programs."""
    patterns = ("eth0", "cni0")
    found = unsuited((ETH, BRIDGE, PORT), PODS, ALWAYS, patterns)
    assert found == "--devices leaves out veth1, a port of the bridge cni0 for a pod"
    assert unsuited((ETH, BRIDGE, PORT), PODS, ALWAYS, (*patterns, "veth*")) is None
    assert unsuited((ETH, DOCKER, CONTAINER), PODS, ALWAYS, ("eth0",)) is None
