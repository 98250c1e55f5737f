# SPDX-License-Identifier: Apache-2.0
"""Addresses are read as Kubernetes reads them (kube-proxy.md 1.4, last bullet)."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.errors import quoted
from ebpflb.model import addresses
from ebpflb.model.addresses import (
    Address,
    Duration,
    format_numbers,
    parse_duration,
    parse_numbers,
    parse_ranges,
)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("172.30.0.041", "172.30.0.41"),
        ("010.000.00.008", "10.0.0.8"),
        ("fd00::1", "fd00::1"),
        ("FD00:0:0::00001", "fd00::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.010", "10.0.0.10"),
        ("64:ff9b::192.0.2.001", "64:ff9b::c000:201"),
    ],
)
def test_leading_zeros_are_decimal(text: str, plain: str) -> None:
    """Leading zeros are decimal, and an IPv4-mapped address is the IPv4 address."""
    assert addresses.parse_address(text) == ip_address(plain)


NOT_AN_ADDRESS = [
    "", " ", " 10.0.0.1", "10.0.0.1 ", "10.0.0", "10.0.0.256", "10.0.0.0.1", "10.0.0.0x1",
    "10.0.0.1/32", "10.0.0.1:80", "١.1.1.1", "fe80::1%eth0", "::1::", "fd00::12345", "[::1]",
    "example.org", "None",
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_AN_ADDRESS)
def test_not_an_address(text: str) -> None:
    """Text that is not an address is refused, with a printable message."""
    with pytest.raises(ValueError) as refusal:
        addresses.parse_address(text)
    assert str(refusal.value) == f'"{text}" is not an IP address'


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.1.2.3/8", "10.0.0.0/8"),
        ("203.0.113.000/025", "203.0.113.0/25"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("fd00:1::5/32", "fd00:1::/32"),
        ("::/0", "::/0"),
        ("::ffff:10.1.2.3/104", "10.0.0.0/8"),
    ],
)
def test_a_cidr_is_masked_to_its_network(text: str, plain: str) -> None:
    """A CIDR is masked to its network; an IPv4-mapped CIDR is the IPv4 network."""
    assert addresses.parse_network(text) == ip_network(plain)


NOT_A_NETWORK = [
    "", "10.0.0.1", "10.0.0.0/", "/8", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/255.0.0.0",
    "10.0.0.0/8/8", "10.0.0.0/ 8", "10.0.0.0/٨", "fd00::/129", "fe80::%eth0/64",
    "::ffff:10.0.0.0/90",
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_A_NETWORK)
def test_not_a_network(text: str) -> None:
    """Netmasks, bare addresses and impossible lengths are refused, with a printable message."""
    with pytest.raises(ValueError) as refusal:
        addresses.parse_network(text)
    assert str(refusal.value) == f'"{text}" is not a CIDR such as 10.0.0.0/8'


@given(some.ip_addresses(v=4), some.lists(some.integers(0, 3), min_size=4, max_size=4))
def test_zeros_in_front_change_nothing(address: IPv4Address, zeros: list[int]) -> None:
    """Zeros in front of an octet do not change the address."""
    octets = zip(str(address).split("."), zeros, strict=True)
    padded = ".".join("0" * count + octet for octet, count in octets)
    assert addresses.parse_address(padded) == address


@given(some.ip_addresses(v=6))
def test_every_ipv6_address_is_read(address: IPv6Address) -> None:
    """Short and long spellings give the same address."""
    expected = address.ipv4_mapped or address
    assert addresses.parse_address(str(address)) == expected
    assert addresses.parse_address(address.exploded) == expected


@given(some.text("0123456789abcdef.:/% x") | some.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    """Any text is read, or refused with a ValueError that quotes it, shortened."""
    for parse in (addresses.parse_address, addresses.parse_network):
        try:
            parse(text)
        except ValueError as error:
            assert quoted(text) in str(error)


@given(some.ip_addresses(), some.integers(0, 65535))
def test_an_endpoint_is_written_as_its_address(address: Address, port: int) -> None:
    """An endpoint is written as its address and port, with IPv6 addresses in brackets."""
    host = f"[{address}]" if address.version == 6 else str(address)
    assert addresses.host_port(address, port) == f"{host}:{port}"


# Go's durations, read and written.


@pytest.mark.parametrize(
    ("text", "written", "seconds"),
    [
        ("30s", "30s", 30),
        ("1h0m0s", "1h0m0s", 3600),
        ("24h", "24h0m0s", 86400),
        ("0", "0s", 0),
        ("0s", "0s", 0),
        ("1.5h", "1h30m0s", 5400),
        ("90s", "1m30s", 90),
        ("1m2.5s", "1m2.5s", 62.5),
        ("250ms", "250ms", 0.25),
        ("1.5ms", "1.5ms", 1.5e-3),
        ("1.5us", "1.5µs", 1.5e-6),
        ("7ns", "7ns", 7e-9),
        (".5s", "500ms", 0.5),
        ("-1m", "-1m0s", -60),
        ("+2s", "2s", 2),
    ],
)
def test_as_go_writes_it(text: str, written: str, seconds: float) -> None:
    """A duration that Go accepts is parsed, and formatted as in Go."""
    found = parse_duration(text)
    assert str(found) == written
    assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "30", "s", ".s", "1d", "-", " 1s", "1s ", "1 s", "9999999h"])
def test_an_invalid_duration_is_rejected(text: str) -> None:
    """A duration that Go does not accept is rejected, with an example in the message."""
    with pytest.raises(ValueError, match="is not a duration such as 30s or 1h30m"):
        parse_duration(text)


def test_a_number_alone_lacks_its_unit() -> None:
    """The error for a number says that the unit is missing, which is the most frequent mistake."""
    with pytest.raises(ValueError, match="the unit is missing"):
        parse_duration("30")


@given(some.integers(-(2**62), 2**62))
def test_round_trip(nanoseconds: int) -> None:
    """A written duration reads back the same."""
    assert parse_duration(str(Duration(nanoseconds))) == nanoseconds


@pytest.mark.parametrize(("text", "seconds"), [("0", 0), ("1ms", 1), ("1.9s", 1), ("2m", 120)])
def test_whole_seconds(text: str, seconds: int) -> None:
    """The kernel gets whole seconds, and 0 only if the duration is 0."""
    assert parse_duration(text).whole_seconds == seconds


# The kernel's lists of numbers.


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0\n", [0]),
        ("0-3\n", [0, 1, 2, 3]),
        ("0-1,8-9,15\n", [0, 1, 8, 9, 15]),
        ("\n", []),
        ("", []),
    ],
)
def test_a_list_has_numbers_and_ranges(text: str, numbers: list[int]) -> None:
    """A list has single numbers and ranges with commas between, or is empty."""
    assert [number for span in parse_ranges(text) for number in span] == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-2-"])
def test_no_list(text: str) -> None:
    """Text that is not a list of numbers and ranges is an error."""
    with pytest.raises(ValueError):
        parse_ranges(text)


@given(some.sets(some.integers(1, 300)))
def test_format_is_the_inverse(numbers: set[int]) -> None:
    """A written list reads back the same."""
    assert parse_numbers(format_numbers(numbers)) == numbers


def test_neighbours_are_one_range() -> None:
    """Neighbours are one range, as the kernel writes it."""
    assert format_numbers({80, 20000, 20001, 20002, 443}) == "80,443,20000-20002"
    assert parse_numbers("\n") == set()
