# SPDX-License-Identifier: Apache-2.0
"""The served devices, and the masquerade address of each."""

from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

from ebpflb.model import addresses, devices
from ebpflb.model.addresses import Address, Family
from ebpflb.model.devices import (
    Device,
    by_importance,
    by_index,
    check_pattern,
    is_bridged,
    is_host_only,
    masquerade_addresses,
    node_addresses,
    served,
)


def device(index: int, name: str, *own: str, master: int = 0, loopback: bool = False) -> Device:
    found = tuple(map(ip_address, own))
    return Device(index, name, loopback, True, master, found, found)


def both(v4: str, v6: str) -> dict[Family, Address]:
    return {Family.IPV4: ip_address(v4), Family.IPV6: ip_address(v6)}


LO = device(1, "lo", "203.0.113.1", loopback=True)
ETH = device(2, "eth0", "192.0.2.1", "192.0.2.2", "2001:db8::1")
BRIDGE = device(3, "cni0", "10.244.1.1", "fd00::1")
PORT = device(4, "veth1", master=3)
ALONE = device(5, "cali1")
ALL = (LO, ETH, BRIDGE, PORT, ALONE)
NODE = both("192.0.2.2", "2001:db8::1")


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ((), "eth0 cni0 veth1 cali1"),
        (("eth*",), "eth0"),
        (("eth0", "veth?"), "eth0 veth1"),
        (("!cali*",), "eth0 cni0 veth1"),
        (("*[01]", "!eth0"), "cni0 veth1 cali1"),
        (("!*",), ""),
        (("lo",), ""),
        (("ETH0",), ""),
    ],
)
def test_an_exclusion_always_wins(patterns: tuple[str, ...], names: str) -> None:
    """All devices are served, or those that match a pattern; an exclusion always wins; loopback is
    never served.
    """
    assert [device.name for device in served(ALL, patterns)] == names.split()


@pytest.mark.parametrize("patterns", [(), ("ifb*",)])
def test_a_shapers_queue_is_not_served(patterns: tuple[str, ...]) -> None:
    """A shaper's queue device is not served: packets pass it with a choice, between our ingress and
    the stack.
    """
    assert not served((replace(device(6, "ifb0"), kind="ifb"),), patterns)


@pytest.mark.parametrize(
    ("kind", "patterns", "names"),
    [
        ("bond", (), "bond0 eth2"),
        ("team", (), "bond0 eth2"),
        ("bond", ("eth*",), "eth1 eth2"),
        ("bond", ("!eth2",), "bond0"),
        ("bridge", (), "bond0 eth1 eth2"),
        ("vrf", (), "bond0 eth1 eth2"),
    ],
)
def test_served_with_a_bond(kind: str, patterns: tuple[str, ...], names: str) -> None:
    """A served bond replaces its members. A VRF, or a bridge that is not plain, is served in
    addition to its ports.
    """
    bond = replace(device(9, "bond0"), kind=kind)
    every = bond, device(7, "eth1", master=9), device(8, "eth2")
    assert [each.name for each in served(every, patterns)] == names.split()


UPLINK_BRIDGE = replace(device(9, "br0"), kind="bridge", plain_bridge=True)


@pytest.mark.parametrize(
    ("bridge", "port", "patterns", "names"),
    [
        ({}, {}, (), "br0"),
        ({}, {"kind": "bond"}, (), "br0"),
        ({}, {"kind": "macvlan"}, (), "br0"),
        ({"plain_bridge": False}, {}, (), "br0 eth1"),
        ({}, {"hairpin": True}, (), "br0 eth1"),
        ({}, {"kind": "veth"}, (), "br0 eth1"),
        ({}, {"kind": "netkit"}, (), "br0 eth1"),
        ({}, {"kind": "tun"}, (), "br0 eth1"),
        ({}, {}, ("eth*",), "eth1"),
        ({}, {}, ("!br0",), "eth1"),
        ({"master": 6}, {}, (), "br0"),
    ],
)
def test_served_with_a_bridge(
    bridge: dict[str, Any], port: dict[str, Any], patterns: tuple[str, ...], names: str
) -> None:
    """A served plain bridge replaces its only port, unless the port belongs to a pod or virtual
    machine, or sends frames back.
    """
    every = replace(UPLINK_BRIDGE, **bridge), replace(device(7, "eth1", master=9), **port)
    assert [each.name for each in served(every, patterns)] == names.split()


@pytest.mark.parametrize("kind", ["", "veth", "tun"])
@pytest.mark.parametrize("patterns", [(), ("!d8",)])
def test_served_with_a_second_port(kind: str, patterns: tuple[str, ...]) -> None:
    """All ports, served or not, have programs if frames may go from one port to another."""
    port, second = device(7, "eth1", master=9), replace(device(8, "d8", master=9), kind=kind)
    assert port in served((UPLINK_BRIDGE, port, second), patterns)


@pytest.mark.parametrize(
    ("programmed", "names"), [((), "br0"), ((7,), "br0 eth1"), ((9,), "br0"), ((7, 9), "br0")]
)
def test_a_port_keeps_its_programs_until_its_master_has_them(
    programmed: tuple[int, ...], names: str
) -> None:
    """A port of a bridge or bond keeps its programs until the master has them; a port without
    programs gets none in between.
    """
    port = device(7, "eth1", master=9)
    for master in (UPLINK_BRIDGE, replace(UPLINK_BRIDGE, kind="bond", plain_bridge=False)):
        assert [each.name for each in served((master, port), (), programmed)] == names.split()


@pytest.mark.parametrize("pattern", ["", "!", "a b", "a/b", "\t"])
def test_no_pattern(pattern: str) -> None:
    """A pattern that cannot match a device's name is refused."""
    with pytest.raises(ValueError, match="is not a pattern"):
        check_pattern(pattern)


def test_own_address() -> None:
    """A device's own first address is used, even if the Node names another of its addresses."""
    assert masquerade_addresses(ALL, NODE)[2] == both("192.0.2.1", "2001:db8::1")


def test_masters_address() -> None:
    """A bridge's port uses the bridge's address, through any number of masters."""
    vrf = device(6, "vrf", "198.51.100.1")
    slave = device(7, "br1", "fd00::7", master=6)
    port = device(8, "veth2", master=7)
    assert masquerade_addresses(ALL, NODE)[4] == both("10.244.1.1", "fd00::1")
    assert masquerade_addresses((vrf, slave, port), {})[8] == both("198.51.100.1", "fd00::7")


def test_node_on_loopback() -> None:
    """The Node's address may be on loopback; other addresses of loopback are not used."""
    assert (
        node_addresses(ALL, {Family.IPV4: ip_address("203.0.113.1")})[Family.IPV4]
        == LO.addresses[0]
    )
    assert node_addresses((LO,), {}) == {}


@pytest.mark.parametrize(
    ("masters", "host_only", "bridged"),
    [
        ("", True, False),
        ("bond", True, False),
        ("team vrf", True, False),
        ("bridge", False, True),
        ("bond bridge", False, True),
        ("openvswitch", False, False),
        ("bridge openvswitch", False, False),
        ("bridge vrf", False, True),
        ("unknown", False, False),
    ],
)
def test_masters_decide_whether_a_device_is_bridged(
    masters: str, host_only: bool, bridged: bool
) -> None:
    """Each chain of masters says whether the device is for the host only, and whether it is
    bridged.
    """
    kinds = ["", *masters.split()]
    known = [
        replace(device(number, f"d{number}", master=number + 1), kind=kind)
        for number, kind in enumerate(kinds, 1)
    ]
    known[-1] = replace(known[-1], master=0)
    assert is_host_only(known[0], by_index(tuple(known))) is host_only
    assert is_bridged(known[0], by_index(tuple(known))) is bridged


def test_order_of_the_first_programs() -> None:
    """First come devices with an address of the Node and their ports, except pods'; then physical
    devices and devices with another address; then pods' devices, the newest first.
    """
    bond = replace(device(9, "bond0", "192.0.2.2"), kind="bond")
    ports = device(7, "eth1", master=9), replace(device(6, "veth9", master=9), kind="veth")
    pods = replace(device(5, "cali1", "169.254.1.1"), kind="veth"), ports[1]
    tap = replace(device(8, "tap0"), kind="tun")
    vxlan = replace(device(4, "vxlan0", "10.244.1.0"), kind="vxlan")
    spare = device(3, "eth2")
    own, others = by_importance((spare, vxlan, pods[0], ports[1], ports[0], tap, bond), NODE)
    assert own == (ports[0], bond, spare, vxlan)
    assert others == (tap, ports[1], pods[0])
    uplink = replace(device(2, "eth0", "192.0.2.2"), kind="veth")
    assert by_importance((tap, uplink), NODE) == ((uplink,), (tap,))


# --nodeport-addresses: on which of our addresses NodePorts are served (kube-proxy.md 8). The list

FIRST4, OTHER4 = "10.20.30.51", "100.200.201.1"
FIRST6, OTHER6 = "2001:db8::1", "fd00:1::5"
HERE = [ip_address(ip) for ip in (FIRST4, OTHER4, "127.0.0.1", FIRST6, OTHER6, "::1")]
PRIMARY = {Family.IPV4: ip_address(FIRST4), Family.IPV6: ip_address(FIRST6)}
ALL4, ALL6 = f"{FIRST4} {OTHER4}", f"{FIRST6} {OTHER6}"

LISTS = {
    "one of IPv4": ("10.20.30.0/24", FIRST4, ALL6),
    "everything of IPv4": ("0.0.0.0/0", ALL4, ALL6),
    "several of IPv6": ("2001:db8::/64 fd00::/16", ALL4, ALL6),
    "everything of IPv6": ("::/0", ALL4, ALL6),
    "IPv4 loopback exactly": ("127.0.0.1/32", "", ALL6),
    "IPv4 loopback": ("127.0.0.0/8", "", ALL6),
    "several of IPv4": ("10.20.30.0/24 100.200.201.0/24", ALL4, ALL6),
    "none of IPv4": ("10.20.30.0/28", "", ALL6),
    "none of IPv6": ("fd00:2::/32", ALL4, ""),
    "one of each": ("10.20.30.0/24 2001:db8::/64", FIRST4, FIRST6),
    "everything of both": ("0.0.0.0/0 ::/0", ALL4, ALL6),
    "everything beside a range": ("10.20.30.0/24 0.0.0.0/0", ALL4, ALL6),
    "no list": ("", ALL4, ALL6),
    "sloppy": ("010.020.030.000/024", FIRST4, ALL6),
    "a bare address": (OTHER4, OTHER4, ALL6),
    "primary": ("primary", FIRST4, FIRST6),
    "primary and localhost": ("primary localhost", FIRST4, FIRST6),
    "primary and a range": ("primary 100.200.201.0/24", ALL4, FIRST6),
    "localhost": ("localhost", "", ""),
    "all": ("all", ALL4, ALL6),
}


def serving(
    text: str, primary: dict[Family, Address] = PRIMARY, here: list[Address] = HERE
) -> set[str]:
    return {
        str(address) for address in devices.served_addresses(here, tuple(text.split()), primary)
    }


@pytest.mark.parametrize(("text", "four", "six"), LISTS.values(), ids=LISTS)
def test_exactly_the_listed_addresses_serve(text: str, four: str, six: str) -> None:
    """Exactly the listed addresses serve; for a family without entries all addresses serve (8)."""
    assert serving(text) == {*four.split(), *six.split()}


@pytest.mark.parametrize(
    ("known", "found"),
    [
        ({}, f"{ALL4} {ALL6}"),
        ({Family.IPV4: PRIMARY[Family.IPV4]}, f"{FIRST4} {ALL6}"),
        ({Family.IPV6: PRIMARY[Family.IPV6]}, f"{ALL4} {FIRST6}"),
    ],
    ids=["neither", "IPv4 alone", "IPv6 alone"],
)
def test_primary_unknown(known: dict[Family, Address], found: str) -> None:
    """A family whose node address is unknown is served on all its addresses (8)."""
    assert serving("primary", known) == set(found.split())


CIDRS = some.lists(some.sampled_from([f"{ip}/{n}" for ip in HERE for n in (0, 8, 24, 32)]))


@given(CIDRS)
def test_never_loopback_never_foreign(listed: list[str]) -> None:
    """The result has exactly the node's addresses in the listed CIDRs, without loopback."""
    found = devices.served_addresses(HERE, tuple(listed), PRIMARY)
    networks = [addresses.parse_network(text) for text in listed]
    for address in HERE:
        mine = [n for n in networks if n.version == address.version]
        inside = not mine or any(address in network for network in mine)
        assert (address in found) is (inside and not address.is_loopback)
