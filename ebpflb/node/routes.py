# SPDX-License-Identifier: Apache-2.0
"""Where the kernel would route a packet, in the network namespace of the thread (rtnetlink)."""

from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from typing import Any, NamedTuple

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from ebpflb.model.addresses import Address

_UNICAST, _LOCAL = 1, 2  # RTN_UNICAST, RTN_LOCAL
_CLOSED = {6: "blackhole", 7: "unreachable", 8: "prohibit"}  # RTN_BLACKHOLE, ...
_AF = {4: 2, 6: 10}


class Route(NamedTuple):
    """``ifindex`` is 0 where the packet goes nowhere, and ``why`` says so.

    ``local``: it is for this namespace itself. ``gateway``: None for a neighbour.
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
    """Of a packet of this node, or with ``came_by`` of one that came in by that device.

    Raises OSError where rtnetlink cannot be asked.
    """
    words: dict[str, Any] = {"dst": str(destination)}
    if source is not None and came_by:
        words["src"] = str(source)
    if came_by:
        words["iif"] = came_by
    if mark:
        words["mark"] = mark
    with IPRoute() as ipr:
        try:
            answer = next(iter(ipr.route("get", **words)))
        except NetlinkError as error:
            return Route(0, why=str(error.args[-1]).lower())
        return _read(ipr, answer)


def without_route(destinations: Iterable[Address]) -> Iterator[tuple[Address, str]]:
    """Those to which this node has no route, or one that lets nothing through; and why."""
    with IPRoute() as ipr:
        for each in destinations:
            try:
                next(iter(ipr.route("get", dst=str(each))))
            except NetlinkError as error:
                yield each, str(error.args[-1]).lower()


def default_devices(version: int) -> Iterator[int]:
    """The devices of default routes, that of the lowest metric first."""
    with IPRoute() as ipr:
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
