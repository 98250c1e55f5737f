# SPDX-License-Identifier: Apache-2.0
"""--nodeport-addresses: on which of our addresses NodePorts are served (kube-proxy.md 8).

The lists follow upstream's nodeport_addresses_test; loopback, which no packet may ask, is never
in the answer: the node's own processes are served there by the datapath.
"""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.model import addresses, devices
from ebpflb.model.addresses import Address, Family

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
def test_lists(text: str, four: str, six: str) -> None:
    """Exactly the addresses inside; a family of which nothing is listed is served on all (8)."""
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


def test_primary_elsewhere() -> None:
    """A Node's address that is not assigned here serves nothing, and opens nothing else."""
    assert serving("primary", {Family.IPV4: ip_address("192.0.2.9")}) == set(ALL6.split())


def test_no_cidr() -> None:
    """A text that is not a CIDR is refused."""
    with pytest.raises(ValueError, match="is not a CIDR"):
        serving("10.0.0.0/33")


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
