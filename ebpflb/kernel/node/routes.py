# SPDX-License-Identifier: Apache-2.0
"""Where the kernel would route a packet, in the network namespace of the thread (rtnetlink)."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, if_indextoname, socket
from struct import Struct
from typing import NamedTuple

from ebpflb.errors import instead_of_os_error
from ebpflb.kernel import netlink
from ebpflb.model.addresses import Address

# rtnetlink's messages (linux/rtnetlink.h, linux/fib_rules.h).
_GET_ROUTE, _GET_RULE = 26, 34  # RTM_*
_HEADER = Struct("=8BI")  # struct rtmsg; that of rules, struct fib_rule_hdr, is as long
_TYPE_PLACE = 7  # among its fields
_DESTINATION, _SOURCE, _CAME_BY, _LEAVES_BY = 1, 2, 3, 4  # RTA_*
_GATEWAY, _PRIORITY, _PREFERRED_SOURCE, _TABLE, _MARK = 5, 6, 7, 15, 16
_RULE_MARK, _RULE_MASK = 10, 16  # FRA_FWMARK, FRA_FWMASK
_MAIN = 254  # RT_TABLE_MAIN
_AF = {4: AF_INET, 6: AF_INET6}

Attributes = Mapping[int, bytes]


def _header(family: int, bits: int = 0, source_bits: int = 0) -> bytes:
    return _HEADER.pack(family, bits, source_bits, 0, 0, 0, 0, 0, 0)


def _number(found: Attributes, kind: int) -> int:
    """Return a number in the order of this machine; 0 without the attribute."""
    return int.from_bytes(found.get(kind, b""), sys.byteorder)


def _ask(
    kernel: socket,
    destination: Address,
    source: Address | None = None,
    came_by: int = 0,
    mark: int = 0,
) -> tuple[int, Attributes]:
    """Return the type and the attributes of the route that the kernel selects. Raises OSError."""
    bits = destination.max_prefixlen
    content = _header(_AF[destination.version], bits, bits if source else 0)
    content += netlink.attribute(_DESTINATION, destination.packed)
    if source:
        content += netlink.attribute(_SOURCE, source.packed)
    for kind, number in ((_CAME_BY, came_by), (_MARK, mark)):
        if number:
            content += netlink.attribute(kind, number.to_bytes(4, sys.byteorder))
    answer = netlink.request(kernel, _GET_ROUTE, content)
    kind = _HEADER.unpack_from(answer)[_TYPE_PLACE]
    return kind, netlink.attributes(answer, _HEADER.size)


# The routing rules of this network namespace (ip rule) that select a table by a mark.


def rule_marks() -> set[int]:
    """Return the marks, under their masks. Raises NodeError."""
    with instead_of_os_error("routing rules cannot be listed"):
        messages = [
            it for family in _AF.values() for it in netlink.dump(_GET_RULE, _header(family))
        ]
    rules = [netlink.attributes(message, _HEADER.size) for message in messages]
    every_bit = (2**32 - 1).to_bytes(4, sys.byteorder)
    masked = (
        _number(rule, _RULE_MARK) & _number({_RULE_MASK: every_bit, **rule}, _RULE_MASK)
        for rule in rules
    )
    return set(masked) - {0}


_LOCAL = 2  # RTN_LOCAL
_CLOSED = {6: "blackhole", 7: "unreachable", 8: "prohibit"}  # RTN_BLACKHOLE, ...


class Route(NamedTuple):
    """A route; ``ifindex`` is 0 if the packet is dropped, and ``why`` says why.

    ``local``: the destination is this namespace itself. ``gateway``: None for a neighbour.
    """

    ifindex: int
    device: str = ""
    gateway: Address | None = None
    source: Address | None = None
    local: bool = False
    why: str = ""


def route_to(
    destination: Address, source: Address | None = None, came_by: int = 0, mark: int = 0
) -> Route:
    """Return the route of a packet of this node, or of one that came in by device ``came_by``.

    Raises OSError if rtnetlink is not available.
    """
    with netlink.route_socket() as kernel:
        try:
            kind, found = _ask(kernel, destination, source if came_by else None, came_by, mark)
        except OSError as error:
            return Route(0, why=_reason(error))
    return _read(kind, found)


def without_route(destinations: Iterable[Address]) -> Iterator[tuple[Address, str]]:
    """Yield the destinations without a usable route from this node, and why."""
    with netlink.route_socket() as kernel:
        for each in destinations:
            try:
                _ask(kernel, each)
            except OSError as error:
                yield each, _reason(error)


# By the default route, whatever else the node knows: addresses for benchmarks (RFC 6890).
_FAR_AWAY = tuple(map(ip_address, ("198.18.0.1", "2001:2::1")))


def routers() -> set[Address]:
    """Return the next hops of default routes, without listing the routes. Raises OSError."""
    found = (route_to(each).gateway for each in _FAR_AWAY)
    return {each for each in found if each is not None}


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()


def default_devices(version: int) -> Iterator[int]:
    """Yield the devices of default routes, lowest metric first."""
    messages = netlink.dump(_GET_ROUTE, _header(_AF[version]))
    found = [netlink.attributes(message, _HEADER.size) for message in messages]
    of_main = [it for it in found if _DESTINATION not in it and _number(it, _TABLE) == _MAIN]
    for route in sorted(of_main, key=lambda it: _number(it, _PRIORITY)):
        if _LEAVES_BY in route:
            yield _number(route, _LEAVES_BY)


def _read(kind: int, found: Attributes) -> Route:
    if kind in _CLOSED:
        return Route(0, why=f"a route of type {_CLOSED[kind]}")
    ifindex = _number(found, _LEAVES_BY)
    gateway, source = found.get(_GATEWAY), found.get(_PREFERRED_SOURCE)
    return Route(
        ifindex,
        if_indextoname(ifindex) if ifindex else "",
        ip_address(gateway) if gateway else None,
        ip_address(source) if source else None,
        local=kind == _LOCAL,
    )
