# SPDX-License-Identifier: Apache-2.0
"""Which source the kernel's routes would select, by device and destination (rtnetlink).

Programs ask the kernel themselves if they can (``probe.route_source``). Otherwise the kernel's
answers are listed here, for devices that have more than one address.
"""

import errno
from collections import defaultdict
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from itertools import islice
from typing import Any

from ebpflb.kernel import pyroute2_parts
from ebpflb.model import route_sources
from ebpflb.model.addresses import Address, Family, Network, family
from ebpflb.model.devices import Device, Devices
from ebpflb.model.route_sources import DeviceRoute, RouteSource

MOST_ROUTES = 10_000  # per family; a router may have a million


_FAMILY_NUMBERS = {Family.IPV4: 2, Family.IPV6: 10}


_ANY = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}


_UNICAST_TYPE, _MAIN = 1, 254  # RTN_UNICAST, RT_TABLE_MAIN


_NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODEV, errno.EINVAL, errno.EACCES}


def list_route_sources(ipr: Any, devices: Devices) -> tuple[RouteSource, ...]:
    """Return the route sources. Raises NetlinkError or OSError."""
    found: list[RouteSource] = []
    for each in Family:
        routes = _routes(ipr, each)
        for device in devices:
            if not device.loopback:
                found += _of_device(ipr, device, each, routes[device.index])
    return tuple(found)


def _of_device(
    ipr: Any, device: Device, wanted: Family, routes: dict[Network, DeviceRoute]
) -> Iterator[RouteSource]:
    sources = [source for source in device.sources if family(source) == wanted]
    prefixes = route_sources.prefixes(routes.values(), sources)
    answers: dict[Network, Address] = {}
    for network in prefixes:
        destination = route_sources.example(network, prefixes)
        answer = destination and _ask(ipr, device.index, destination)
        if not answer and network in routes:
            answer = routes[network].source
        if answer:
            answers[network] = answer
    for network, source in route_sources.differing(answers).items():
        yield RouteSource(device.index, network, source)


def _ask(ipr: Any, ifindex: int, destination: Address) -> Address | None:
    """Return the source of a packet that leaves by this device; None if no route does so."""
    try:
        answers = list(ipr.route("get", dst=str(destination), oif=ifindex))
    except pyroute2_parts.NetlinkError as error:
        if error.code in _NO_ROUTE:
            return None
        raise
    answer = answers[0]
    source = answer.get_attr("RTA_PREFSRC")
    if not source or answer["type"] != _UNICAST_TYPE or answer.get_attr("RTA_OIF") != ifindex:
        return None
    return ip_address(source)


def _routes(ipr: Any, wanted: Family) -> dict[int, dict[Network, DeviceRoute]]:
    """Return the routes by device and destination; main table first, then by metric."""
    listed = islice(ipr.get_routes(family=_FAMILY_NUMBERS[wanted]), MOST_ROUTES)
    messages = [message for message in listed if message["type"] == _UNICAST_TYPE]
    found: defaultdict[int, dict[Network, DeviceRoute]] = defaultdict(dict)
    for message in sorted(messages, key=_rank):
        for ifindex in _devices(message):
            route = _route(message, ifindex, wanted)
            found[ifindex].setdefault(route.network, route)
    return found


def _rank(message: Any) -> tuple[bool, int]:
    return message.get_attr("RTA_TABLE") != _MAIN, message.get_attr("RTA_PRIORITY") or 0


def _devices(message: Any) -> list[int]:
    """Return the route's devices; a route with several paths has several."""
    if (ifindex := message.get_attr("RTA_OIF")) is not None:
        return [ifindex]
    return [path["oif"] for path in message.get_attr("RTA_MULTIPATH") or ()]


def _route(message: Any, ifindex: int, wanted: Family) -> DeviceRoute:
    destination = message.get_attr("RTA_DST") or _ANY[wanted]
    source = message.get_attr("RTA_PREFSRC")
    network = ip_network((destination, message["dst_len"]))
    return DeviceRoute(ifindex, network, ip_address(source) if source else None)
