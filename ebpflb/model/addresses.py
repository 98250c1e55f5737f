# SPDX-License-Identifier: Apache-2.0
"""Addresses, durations, sizes and lists of numbers, as people and the kernel write them.

Addresses are parsed as leniently as Kubernetes does it.

Old objects hold "172.30.0.041" or "203.0.113.000/025"; kube-proxy reads leading zeros as decimal
and masks a CIDR to its network (kube-proxy.md 1.4), ``ipaddress`` refuses both. As in Go, an
IPv4-mapped IPv6 address *is* the IPv4 address. Scopes (%eth0) are refused.

Correct text takes a fast path: a large cluster has 100,000 addresses to parse at start.
"""

import re
from collections.abc import Callable
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from ebpflb.errors import quoted

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class Family(IntEnum):
    IPV4 = 4
    IPV6 = 6

    def __str__(self) -> str:
        return f"IPv{self.value}"


FAMILIES = {str(family): family for family in Family}  # "IPv4" and "IPv6", the API's names

_LEADING_ZEROS = re.compile(r"(?<![0-9A-Fa-f])0+(?=[0-9A-Fa-f])")
_OCTETS = {str(number): number for number in range(256)}
_SPECIAL: dict[str, Callable[[Address], bool]] = {
    "an unspecified address": lambda address: address.is_unspecified,
    "a loopback address": lambda address: address.is_loopback,
    "a link-local address": lambda address: address.is_link_local,
    "a multicast address": lambda address: address.is_multicast,
}
PORTS = range(1, 1 << 16)
_MAPPED_PREFIX = 96  # ::ffff:10.0.0.0/104 is 10.0.0.0/8


def number(address: Address) -> int:
    """Return the address as a number of 128 bits, IPv4 as v4-mapped IPv6."""
    return 0xFFFF << 32 | int(address) if isinstance(address, IPv4Address) else int(address)


def family(value: Address | Network) -> Family:
    return Family.IPV4 if value.version == 4 else Family.IPV6


def host_port(address: Address, port: int) -> str:
    return f"{address!s}:{port}" if isinstance(address, IPv4Address) else f"[{address!s}]:{port}"


def parse_host_port(text: str, ports: range = PORTS) -> tuple[Address, int]:
    """Parse ADDRESS:PORT or [ADDRESS]:PORT. Raises ValueError, with a message for the operator."""
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not colon or (":" in host and not is_bracketed):
        raise ValueError(f"{quoted(text)} is not ADDRESS:PORT such as 0.0.0.0:10256")
    if not (port.isascii() and port.isdigit() and int(port) in ports):
        raise ValueError(f"{quoted(port)} is not a port from {ports[0]} to {ports[-1]}")
    return parse_address(host[1:-1] if is_bracketed else host), int(port)


def parse_address(text: str, wanted: Family | None = None) -> Address:
    """Return the address.

    Raises ValueError, with a message for the operator, if it is not an address, or not of the
    wanted family.
    """
    address = _lenient(text)
    if wanted is not None and address.version != wanted:
        raise ValueError(f"{quoted(text)} is not an {wanted} address")
    return address


def parse_frontend(text: str, wanted: Family | None = None) -> Address:
    """Return an address that a Service may have: no special one, as the API server validates.

    See ValidateNonSpecialIP for spec.externalIPs. An unspecified address would match every
    NodePort. Raises ValueError, with a message for the operator.
    """
    address = parse_address(text, wanted)
    for name, is_special in _SPECIAL.items():
        if is_special(address):
            raise ValueError(f"{quoted(text)} is {name}, which a Service may not have")
    return address


def parse_network(text: str) -> Network:
    """Return the network of address/length. Raises ValueError, with a message for the operator."""
    host, _, length = text.partition("/")
    try:
        if not (length.isascii() and length.isdigit()):
            raise ValueError
        return _network(parse_address(host), int(length), mapped=":" in host)
    except ValueError:
        raise ValueError(f"{quoted(text)} is not a CIDR such as 10.0.0.0/8") from None


def _lenient(text: str) -> Address:
    try:
        return _strict(text)
    except ValueError:
        pass
    try:
        return _strict(_LEADING_ZEROS.sub("", text))
    except ValueError:
        raise ValueError(f"{quoted(text)} is not an IP address") from None


def _strict(text: str) -> Address:
    if ":" not in text:
        return _v4(text)
    if "%" in text:
        raise ValueError("scoped")
    address = IPv6Address(text)
    return address.ipv4_mapped or address


def _v4(text: str) -> IPv4Address:
    """Parse as strictly as ``ipaddress``, in a third of the time."""
    try:
        a, b, c, d = map(_OCTETS.__getitem__, text.split("."))
    except KeyError as error:
        raise ValueError(text) from error
    return IPv4Address(a << 24 | b << 16 | c << 8 | d)


def _network(host: Address, length: int, *, mapped: bool) -> Network:
    if isinstance(host, IPv6Address):
        return IPv6Network((int(host), length), strict=False)
    return IPv4Network((int(host), length - _MAPPED_PREFIX if mapped else length), strict=False)


# Go's durations as text: "300ms", "1h0m0s", "-1.5h" (time.ParseDuration, Duration.String).


_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_LONGEST = 2**63 - 1  # nanoseconds: Go's int64
_LONGEST_TEXT = 64  # characters: all that mean something are shorter
NOT_A_DURATION = "is not a duration such as 30s or 1h30m"


class Duration(int):
    """A number of nanoseconds; str() gives what Go writes."""

    @property
    def seconds(self) -> float:
        return self / 10**9

    @property
    def whole_seconds(self) -> int:
        """Whole seconds for the kernel's timeouts: rounded down, but at least 1 unless it is 0."""
        return max(1, self // 10**9) if self else 0

    def __str__(self) -> str:
        sign, rest = ("-" if self < 0 else ""), abs(int(self))
        if rest < 10**9:
            return sign + _short(rest)
        minutes, rest = divmod(rest, 60 * 10**9)
        hours, minutes = divmod(minutes, 60)
        seconds = f"{_decimal(rest, 9)}s"
        if hours:
            return f"{sign}{hours}h{minutes}m{seconds}"
        return f"{sign}{minutes}m{seconds}" if minutes else sign + seconds

    __repr__ = __str__


def parse_duration(text: str) -> Duration:
    """Parse a duration.

    Raises ValueError, with a message for the operator, if Go does not accept it.
    """
    number = text[1:] if text[:1] in ("-", "+") else text
    nanoseconds = None if len(text) > _LONGEST_TEXT else 0 if number == "0" else _sum(number)
    if nanoseconds is None or nanoseconds > _LONGEST:
        unit = ": the unit is missing" if number.isdecimal() else ""
        raise ValueError(f"{quoted(text)} {NOT_A_DURATION}{unit}")
    return Duration(-nanoseconds if text.startswith("-") else nanoseconds)


def _sum(number: str) -> int | None:
    total = at = 0
    while at < len(number):
        part = _PART.match(number, at)
        if part is None or not (part[1] or part[2]):
            return None
        unit, fraction = _NANOSECONDS[part[3]], part[2] or ""
        total += int(part[1] or 0) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
        at = part.end()
    return total if number else None


def _short(nanoseconds: int) -> str:
    """Format a duration of less than a second."""
    if not nanoseconds:
        return "0s"
    for digits, unit in ((6, "ms"), (3, "µs")):
        if nanoseconds >= 10**digits:
            return _decimal(nanoseconds, digits) + unit
    return f"{nanoseconds}ns"


def _decimal(number: int, digits: int) -> str:
    """Return ``number`` divided by 10**``digits``, without trailing zeros."""
    whole, fraction = divmod(number, 10**digits)
    return f"{whole}.{fraction:0{digits}}".rstrip("0") if fraction else str(whole)


# The kernel's lists of numbers, "0-3,5" (bitmap_parselist): CPUs, ports.


def parse_ranges(text: str) -> list[range]:
    """Return the ranges; empty for an empty list. Raises ValueError for an invalid list."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return [range(int(end[0]), int(end[-1]) + 1) for end in ends]


def parse_numbers(text: str) -> set[int]:
    """Return the numbers of such a list."""
    return {number for numbers in parse_ranges(text) for number in numbers}


def format_numbers(numbers: set[int]) -> str:
    """The inverse of parse_numbers."""
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    pairs = zip(firsts, lasts, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


# The sizes of maps that an operator may set with --map-size, as NAME=ENTRIES,...


# The operator's name of a size -> the maps that have this number of entries.
SIZES = {
    "frontends": ("services", "service_places", "cluster_ips"),
    "backends": ("backend_slots", "backend_names", "backend_stats", "backend_loads"),
    "slots": ("slots",),
    "tables": ("choices",),
    "source-ranges": ("source_ranges",),
    "flows": ("tcp_flows",),
    "other-flows": ("other_flows",),
    "affinity": ("affinity", "new_affinity"),
    "sockets": ("sockets",),
    "assignments": ("assignments", "peers"),
    "connections": ("connections",),
}
LEAST_ENTRIES, MOST_ENTRIES = 1024, 1 << 24  # entries
# The latest flows, which are half-open, have as many entries in either table (maps/persistent.h).
HALF_OPEN = 32768
_LEAST = dict.fromkeys(("flows", "other-flows"), LEAST_ENTRIES + 2 * HALF_OPEN)

MapSizes = tuple[tuple[str, int], ...]
"""Names of SIZES with their entries, sorted."""


def parse_map_sizes(text: str) -> MapSizes:
    """Parse NAME=ENTRIES,... Raises ValueError."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in SIZES:
            raise ValueError(f'"{name}" is not one of {", ".join(SIZES)}')
        least = _LEAST.get(name, LEAST_ENTRIES)
        if not (number.isascii() and number.isdecimal() and least <= int(number) <= MOST_ENTRIES):
            raise ValueError(
                f'"{part}" is not {name}=ENTRIES with {least} to {MOST_ENTRIES} entries'
            )
        found[name] = int(number)
    return tuple(sorted(found.items()))


def show_map_sizes(sizes: MapSizes) -> str:
    """The inverse of ``parse_map_sizes``."""
    return ",".join(f"{name}={entries}" for name, entries in sizes)
