# SPDX-License-Identifier: Apache-2.0
"""Where the kernel would route a packet, in the network namespace of the thread (rtnetlink)."""

import errno
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address, ip_network
from socket import AF_INET, AF_INET6, if_indextoname, socket
from struct import Struct
from typing import NamedTuple

from ebpflb.errors import NodeError
from ebpflb.kernel import netlink
from ebpflb.model import route_sources
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.devices import Device, Devices
from ebpflb.model.route_sources import DeviceRoute, RouteSource

# rtnetlink's messages (linux/rtnetlink.h, linux/fib_rules.h).
_GET_ROUTE, _GET_RULE = 26, 34  # RTM_*
_HEADER = Struct("=8BI")  # struct rtmsg; that of rules, struct fib_rule_hdr, is as long
_BITS_PLACE, _TYPE_PLACE = 1, 7  # among its fields
_HOP = Struct("=H2xI")  # struct rtnexthop: length and device
_DESTINATION, _SOURCE, _CAME_BY, _LEAVES_BY = 1, 2, 3, 4  # RTA_*
_GATEWAY, _PRIORITY, _PREFERRED_SOURCE, _HOPS, _TABLE, _MARK = 5, 6, 7, 9, 15, 16
_RULE_MARK, _RULE_MASK = 10, 16  # FRA_FWMARK, FRA_FWMASK
_MAIN = 254  # RT_TABLE_MAIN
_AF = {4: AF_INET, 6: AF_INET6}

Attributes = Mapping[int, bytes]


def gateways() -> set[Address]:
    """Return the gateways of default routes: clients beyond the node's pods. Raises NodeError."""
    try:
        found = [
            ip_address(it[_GATEWAY]) for it in _default_routes(*_AF.values()) if _GATEWAY in it
        ]
    except OSError as error:
        raise NodeError(f"routes cannot be listed: {error.args[-1]}") from error
    return {gateway for gateway in found if not gateway.is_link_local}


def _default_routes(*families: int) -> Iterator[Attributes]:
    """Yield those of the main table. Raises OSError."""
    for family in families:
        for message in netlink.dump(_GET_ROUTE, _header(family)):
            found = netlink.attributes(message, _HEADER.size)
            if _DESTINATION not in found and _number(found, _TABLE) == _MAIN:
                yield found


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
    leaves_by: int = 0,
) -> tuple[int, Attributes]:
    """Return the type and the attributes of the route that the kernel selects. Raises OSError."""
    bits = destination.max_prefixlen
    content = _header(_AF[destination.version], bits, bits if source else 0)
    content += netlink.attribute(_DESTINATION, destination.packed)
    if source:
        content += netlink.attribute(_SOURCE, source.packed)
    for kind, number in ((_CAME_BY, came_by), (_LEAVES_BY, leaves_by), (_MARK, mark)):
        if number:
            content += netlink.attribute(kind, number.to_bytes(4, sys.byteorder))
    answer = netlink.request(kernel, _GET_ROUTE, content)
    kind = _HEADER.unpack_from(answer)[_TYPE_PLACE]
    return kind, netlink.attributes(answer, _HEADER.size)


# The routing rules of this network namespace (ip rule) that select a table by a mark.


def rule_marks() -> set[int]:
    """Return the marks, under their masks. Raises NodeError."""
    try:
        messages = [
            it for family in _AF.values() for it in netlink.dump(_GET_RULE, _header(family))
        ]
    except OSError as error:
        raise NodeError(f"routing rules cannot be listed: {error.args[-1]}") from error
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


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()


def default_devices(version: int) -> Iterator[int]:
    """Yield the devices of default routes, lowest metric first."""
    found = [it for it in _default_routes(_AF[version]) if _LEAVES_BY in it]
    for route in sorted(found, key=lambda it: _number(it, _PRIORITY)):
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


# Which source the kernel's routes would select, by device and destination.
#
# Programs ask the kernel themselves if they can (``probe.route_source``). Otherwise the kernel's
# answers are listed here, for devices that have more than one address.

MOST_ROUTES = 10_000  # per family; a router may have a million
_UNICAST = 1  # RTN_UNICAST
_ANY = {4: bytes(4), 6: bytes(16)}
_NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODEV, errno.EINVAL, errno.EACCES}


def list_route_sources(devices: Devices) -> tuple[RouteSource, ...]:
    """Return the route sources. Raises OSError."""
    found: list[RouteSource] = []
    with netlink.route_socket() as kernel:
        for family in Family:
            routes = _routes(family)
            for device in devices:
                if not device.loopback:
                    found += _sources(kernel, device, family, routes[device.index])
    return tuple(found)


def _sources(
    kernel: socket, device: Device, family: Family, routes: Mapping[Network, DeviceRoute]
) -> Iterator[RouteSource]:
    own = [source for source in device.sources if source.version == family]
    prefixes = route_sources.prefixes(routes.values(), own)
    answers: dict[Network, Address] = {}
    for network in prefixes:
        destination = route_sources.example(network, prefixes)
        answer = destination and _source(kernel, device.index, destination)
        if not answer and network in routes:
            answer = routes[network].source
        if answer:
            answers[network] = answer
    for network, source in route_sources.differing(answers).items():
        yield RouteSource(device.index, network, source)


def _source(kernel: socket, ifindex: int, destination: Address) -> Address | None:
    """Return the source of a packet that leaves by this device; None if no route does so."""
    try:
        kind, found = _ask(kernel, destination, leaves_by=ifindex)
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return None
        raise
    leaves = kind == _UNICAST and _number(found, _LEAVES_BY) == ifindex
    return ip_address(found[_PREFERRED_SOURCE]) if leaves and _PREFERRED_SOURCE in found else None


def _routes(family: Family) -> dict[int, dict[Network, DeviceRoute]]:
    """Return the routes by device and destination; main table first, then by metric."""
    listed = []
    for message in netlink.dump(_GET_ROUTE, _header(_AF[family]), most=MOST_ROUTES):
        header = _HEADER.unpack_from(message)
        if header[_TYPE_PLACE] == _UNICAST:
            listed.append((header[_BITS_PLACE], netlink.attributes(message, _HEADER.size)))
    listed.sort(key=lambda it: (_number(it[1], _TABLE) != _MAIN, _number(it[1], _PRIORITY)))
    found: defaultdict[int, dict[Network, DeviceRoute]] = defaultdict(dict)
    for bits, known in listed:
        network = ip_network((known.get(_DESTINATION, _ANY[family]), bits))
        source = ip_address(known[_PREFERRED_SOURCE]) if _PREFERRED_SOURCE in known else None
        for ifindex in _devices(known):
            found[ifindex].setdefault(network, DeviceRoute(ifindex, network, source))
    return found


def _devices(known: Attributes) -> Iterator[int]:
    """Yield the route's devices; a route with several paths has several."""
    if _LEAVES_BY in known:
        yield _number(known, _LEAVES_BY)
        return
    hops, at = known.get(_HOPS, b""), 0
    while at < len(hops):
        length, ifindex = _HOP.unpack_from(hops, at)
        yield ifindex
        at += netlink.aligned(length)
