# SPDX-License-Identifier: Apache-2.0
"""By which device this thread's network namespace would send replies to clients outside.

The kernel is asked for each route, so its routing rules count too; nothing is sent.
"""

from collections.abc import Collection, Iterator
from ipaddress import ip_address
from socket import AF_INET, AF_INET6
from typing import Any, NamedTuple

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from ebpflb.errors import NodeError
from ebpflb.model.addresses import Address
from ebpflb.node.device_watch import list_devices

# Of no node and no pod, in networks that are routed like the rest of the Internet.
FAR_CLIENTS = (ip_address("1.0.0.1"), ip_address("2000::1"))
_FAMILIES = {4: AF_INET, 6: AF_INET6}


class ReplyRoute(NamedTuple):
    """From an address of a device to a client; ``leaves_by`` is a device, "" without a route."""

    address: Address
    device: str
    client: Address
    leaves_by: str


def replies(addresses: Collection[Address], clients: Collection[Address]) -> list[ReplyRoute]:
    """Of those of the addresses that are here, on other devices than loopback. Raises NodeError."""
    devices = [device for device in list_devices().devices if not device.loopback]
    names = {device.index: device.name for device in devices}
    here = [(a, d.name) for d in devices for a in d.addresses if a in addresses]
    try:
        with IPRoute() as route:
            return [
                ReplyRoute(address, name, client, names.get(_leaves_by(route, address, client), ""))
                for address, name in here
                for client in clients
                if client.version == address.version
            ]
    except OSError as error:
        raise NodeError(f"routes cannot be read: {error.strerror}") from error


def gateways() -> set[Address]:
    """Those of default routes: clients beyond the node's pods. Raises NodeError."""
    try:
        with IPRoute() as route:
            return set(_gateways(route))
    except (NetlinkError, OSError) as error:
        raise NodeError(f"routes cannot be listed: {error.args[-1]}") from error


def _gateways(route: Any) -> Iterator[Address]:
    for family in _FAMILIES.values():
        for found in route.get_default_routes(family):
            gateway = found.get_attr("RTA_GATEWAY")
            if gateway and not ip_address(gateway).is_link_local:
                yield ip_address(gateway)


def _leaves_by(route: Any, address: Address, client: Address) -> int:
    """The index of a device; 0 where the kernel has no route, or one that drops packets."""
    family = _FAMILIES[address.version]
    try:
        (found, *_) = route.route("get", family=family, dst=str(client), src=str(address))
    except NetlinkError:
        return 0
    return found.get_attr("RTA_OIF") or 0
