# SPDX-License-Identifier: Apache-2.0
"""The devices of this network namespace, their addresses and routes, now and as they change."""

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import (
    RTMGRP_IPV4_IFADDR,
    RTMGRP_IPV4_ROUTE,
    RTMGRP_IPV6_IFADDR,
    RTMGRP_IPV6_ROUTE,
    RTMGRP_LINK,
)

from ebpflb.errors import NodeError
from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device, Devices
from ebpflb.model.events import SourceStatus
from ebpflb.model.kube_proxy import DEVICE
from ebpflb.model.route_sources import RouteSource
from ebpflb.node.listed_route_sources import list_route_sources
from ebpflb.node.poller import Poller

_ETHER, _LOOPBACK = 1, 772  # ARPHRD_*: the kernel gives both kinds of packets an Ethernet header
_IFF_LOOPBACK = 8
# IFA_F_SECONDARY (IPv6: temporary), _DADFAILED, _DEPRECATED, _TENTATIVE
_UNFIT = 0x01 | 0x08 | 0x20 | 0x40
_RT_SCOPE_UNIVERSE = 0
_ADDRESSES = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR
_ROUTES = RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_ROUTE
RELIST_SECONDS = 1.0  # pause after a failure to list


@dataclass(frozen=True, slots=True)
class DevicesChanged:
    """All devices that exist now, except the one of kube-proxy's ipvs mode.

    That has every cluster IP, none of which is an address of the node. ``route_sources`` are listed
    only where they are asked for.
    """

    devices: Devices
    route_sources: tuple[RouteSource, ...] = ()

    @property
    def addresses(self) -> frozenset[Address]:
        """All addresses of all devices."""
        return frozenset(address for device in self.devices for address in device.addresses)


def list_devices(*, route_sources: bool = False) -> DevicesChanged:
    """The devices in this network namespace. Raises NodeError."""
    try:
        with IPRoute() as route:
            devices = _devices(route)
            sources = list_route_sources(route, devices) if route_sources else ()
    except (NetlinkError, OSError) as error:
        raise NodeError(f"devices cannot be listed: {error.args[-1]}") from error
    return DevicesChanged(devices, sources)


def _devices(route: IPRoute) -> Devices:
    addresses = defaultdict(list)
    for message in route.get_addr():
        addresses[message["index"]].append(message)
    devices = (_device(link, addresses[link["index"]]) for link in route.get_links())
    return tuple(device for device in devices if device.name != DEVICE)


def _device(link: Any, addresses: list[Any]) -> Device:
    has_link_header = link["ifi_type"] in (_ETHER, _LOOPBACK)
    return Device(
        index=link["index"],
        name=link.get_attr("IFLA_IFNAME"),
        loopback=bool(link["flags"] & _IFF_LOOPBACK),
        link_header=has_link_header,
        master=link.get_attr("IFLA_MASTER") or 0,
        addresses=tuple(_address(message) for message in addresses),
        sources=tuple(_address(message) for message in addresses if _is_source(message)),
        kind=link.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") or "",
        hairpin=bool(link.get_nested("IFLA_LINKINFO", "IFLA_INFO_SLAVE_DATA", "IFLA_BRPORT_MODE")),
        mac=link.get_attr("IFLA_ADDRESS") if has_link_header else "",
    )


def _address(message: Any) -> Address:
    """On a point-to-point link IFA_ADDRESS is the peer's; IFA_LOCAL, if there is one, is ours."""
    return ip_address(message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS"))


def _is_source(message: Any) -> bool:
    return message["scope"] == _RT_SCOPE_UNIVERSE and not message["flags"] & _UNFIT


class DeviceWatch:
    """Emits the list of devices at once and after every change, from a thread of its own.

    A list that fails is tried again until it succeeds. The socket is a plain one: since release
    0.9 pyroute2's may be used only by the thread that made them.
    """

    def __init__(
        self,
        emit: Callable[[DevicesChanged | SourceStatus], None],
        *,
        route_sources: bool = False,
    ) -> None:
        """``route_sources``: routes are watched too."""
        self.emit, self.route_sources = emit, route_sources
        self.changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._poll = Poller("devices", self._report, emit)

    def start(self) -> None:
        """Subscribes before it lists, so that no change is missed. Raises NodeError."""
        self.changes.bind((0, _ADDRESSES | _ROUTES if self.route_sources else _ADDRESSES))
        self._report()
        threading.Thread(target=self._run, name="devices", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._wait()
            while not self._poll():
                time.sleep(RELIST_SECONDS)

    def _report(self) -> None:
        self.emit(list_devices(route_sources=self.route_sources))

    def _wait(self) -> None:
        """Returns after a change, or after changes were lost (ENOBUFS): both need a new list."""
        try:
            self.changes.recv(1 << 16)
            while self.changes.recv(1 << 16, socket.MSG_DONTWAIT):
                pass  # one list is enough for all changes so far
        except BlockingIOError:
            return
        except OSError:
            time.sleep(RELIST_SECONDS)
