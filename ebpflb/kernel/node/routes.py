# SPDX-License-Identifier: Apache-2.0
"""Where the kernel would route a packet, in the network namespace of the thread (rtnetlink)."""

from collections.abc import Collection, Iterable, Iterator
from ipaddress import ip_address
from socket import AF_INET, AF_INET6
from typing import Any, NamedTuple

from ebpflb.errors import NodeError
from ebpflb.kernel import pyroute2_parts
from ebpflb.kernel.node.device_watch import list_devices
from ebpflb.model.addresses import Address

# The device by which this thread's network namespace would send replies to clients outside.
#
# The kernel is asked for each route, so its routing rules count too; no packet is sent.

# Addresses of no node and no pod, in networks that are routed like the rest of the Internet.
FAR_CLIENTS = (ip_address("1.0.0.1"), ip_address("2000::1"))
_REPLY_FAMILIES = {4: AF_INET, 6: AF_INET6}


class ReplyRoute(NamedTuple):
    """The route from an address of a device to a client; ``leaves_by`` is "" without a route."""

    address: Address
    device: str
    client: Address
    leaves_by: str


def replies(addresses: Collection[Address], clients: Collection[Address]) -> list[ReplyRoute]:
    """Return the routes from those addresses that are here, on devices except loopback.

    Raises NodeError.
    """
    devices = [device for device in list_devices().devices if not device.loopback]
    names = {device.index: device.name for device in devices}
    here = [(a, d.name) for d in devices for a in d.addresses if a in addresses]
    try:
        with pyroute2_parts.IPRoute() as route:
            return [
                ReplyRoute(address, name, client, names.get(_leaves_by(route, address, client), ""))
                for address, name in here
                for client in clients
                if client.version == address.version
            ]
    except OSError as error:
        raise NodeError(f"routes cannot be read: {error.strerror}") from error


def gateways() -> set[Address]:
    """Return the gateways of default routes: clients beyond the node's pods. Raises NodeError."""
    try:
        with pyroute2_parts.IPRoute() as route:
            return set(_gateways(route))
    except (pyroute2_parts.NetlinkError, OSError) as error:
        raise NodeError(f"routes cannot be listed: {error.args[-1]}") from error


def _gateways(route: Any) -> Iterator[Address]:
    for family in _REPLY_FAMILIES.values():
        for found in route.get_default_routes(family):
            gateway = found.get_attr("RTA_GATEWAY")
            if gateway and not ip_address(gateway).is_link_local:
                yield ip_address(gateway)


def _leaves_by(route: Any, address: Address, client: Address) -> int:
    """Return the index of a device; 0 if the kernel has no route, or one that drops packets."""
    family = _REPLY_FAMILIES[address.version]
    try:
        (found, *_) = route.route("get", family=family, dst=str(client), src=str(address))
    except pyroute2_parts.NetlinkError:
        return 0
    return found.get_attr("RTA_OIF") or 0


# The routing rules of this network namespace (ip rule) that choose a table by a mark.


def rule_marks() -> set[int]:
    """Return the marks, under their masks. Raises NodeError."""
    try:
        with pyroute2_parts.IPRoute() as route:
            rules = [rule for family in (AF_INET, AF_INET6) for rule in route.get_rules(family)]
    except (pyroute2_parts.NetlinkError, OSError) as error:
        raise NodeError(f"routing rules cannot be listed: {error.args[-1]}") from error
    found = ((rule.get_attr("FRA_FWMARK"), rule.get_attr("FRA_FWMASK")) for rule in rules)
    return {mark & (2**32 - 1 if mask is None else mask) for mark, mask in found if mark} - {0}


_UNICAST, _LOCAL = 1, 2  # RTN_UNICAST, RTN_LOCAL
_CLOSED = {6: "blackhole", 7: "unreachable", 8: "prohibit"}  # RTN_BLACKHOLE, ...
_AF = {4: 2, 6: 10}


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
    words: dict[str, Any] = {"dst": str(destination)}
    if source is not None and came_by:
        words["src"] = str(source)
    if came_by:
        words["iif"] = came_by
    if mark:
        words["mark"] = mark
    with pyroute2_parts.IPRoute() as ipr:
        try:
            answer = next(iter(ipr.route("get", **words)))
        except pyroute2_parts.NetlinkError as error:
            return Route(0, why=str(error.args[-1]).lower())
        return _read(ipr, answer)


def without_route(destinations: Iterable[Address]) -> Iterator[tuple[Address, str]]:
    """Yield the destinations without a usable route from this node, and why."""
    with pyroute2_parts.IPRoute() as ipr:
        for each in destinations:
            try:
                next(iter(ipr.route("get", dst=str(each))))
            except pyroute2_parts.NetlinkError as error:
                yield each, str(error.args[-1]).lower()


def default_devices(version: int) -> Iterator[int]:
    """Yield the devices of default routes, lowest metric first."""
    with pyroute2_parts.IPRoute() as ipr:
        found = [it for it in ipr.get_default_routes(family=_AF[version]) if it.get_attr("RTA_OIF")]
    for route in sorted(found, key=lambda it: it.get_attr("RTA_PRIORITY") or 0):
        yield route.get_attr("RTA_OIF")


def _read(ipr: Any, answer: Any) -> Route:
    if answer["type"] in _CLOSED:
        return Route(0, why=f"a route of type {_CLOSED[answer['type']]}")
    ifindex = answer.get_attr("RTA_OIF") or 0
    gateway, source = answer.get_attr("RTA_GATEWAY"), answer.get_attr("RTA_PREFSRC")
    links = ipr.get_links(ifindex) if ifindex else []
    return Route(
        ifindex,
        links[0].get_attr("IFLA_IFNAME") if links else "",
        ip_address(gateway) if gateway else None,
        ip_address(source) if source else None,
        local=answer["type"] == _LOCAL,
    )
