# SPDX-License-Identifier: Apache-2.0
"""The hosts on this node's links, now and as they change (rtnetlink).

A neighbour counts if the kernel knows its MAC address and would send a packet to its address by the
device that heard of it, without a gateway. So an address that moved to another device counts there,
as soon as its route does. Bridges that filter by VLAN are left out: a port may tag its frames.
"""

import logging
import math
import socket
import sys
from collections.abc import Callable
from ipaddress import ip_address
from struct import Struct

from ebpflb.errors import NodeError
from ebpflb.kernel import netlink
from ebpflb.kernel.node import routes
from ebpflb.kernel.node.routes import OnLink
from ebpflb.model.addresses import Address
from ebpflb.model.events import SourceStatus
from ebpflb.model.neighbours import LearnedPort, Neighbour, Neighbourhood
from ebpflb.workers import DescriptorWorker, Poller

log = logging.getLogger(__name__)

# linux/rtnetlink.h, linux/neighbour.h
_LINKS, _ROUTES, _RULES = {16, 17}, {24, 25}, {32, 33}  # RTM_NEW..., RTM_DEL...
_NEW_NEIGHBOUR, _REMOVED_NEIGHBOUR, _GET_NEIGHBOUR = 28, 29, 30
_INDEX = Struct("=4xI")  # struct ifinfomsg
_HEADER = Struct("=BxxxIHBx")  # struct ndmsg: family, device, state, flags
_ADDRESS, _MAC, _VLAN, _MASTER = 1, 2, 5, 9  # NDA_*
_PERMANENT, _PROXY = 0x80, 0x08  # NUD_PERMANENT, NTF_PROXY
# NUD_REACHABLE, _STALE, _DELAY, _PROBE, _NOARP, _PERMANENT
_KNOWN = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | _PERMANENT
_BRIDGE = 7  # AF_BRIDGE
_MAC_BYTES = 6
# RTMGRP_LINK, _NEIGH, _IPV4_RULE, _IPV4_ROUTE, _IPV6_ROUTE; RTNLGRP_IPV6_RULE
_GROUPS = 0x1 | 0x4 | 0x80 | 0x40 | 0x400 | 1 << 18
RELIST_SECONDS = 1.0  # pause after a failed listing, or a loss


class NeighbourTable:
    """What the kernel's messages have said since the first ``read``, which lists everything."""

    def __init__(self) -> None:
        self._macs: dict[tuple[int, Address], str] = {}
        self._ports: dict[tuple[int, str], int] = {}
        self._routes: dict[Address, OnLink | None] = {}  # asked, and not changed since
        self._is_listed = False

    def note(self, messages: bytes) -> None:
        """Note the changes that these messages of the kernel are about."""
        for kind, _, _, begin, end in netlink.split(messages):
            if kind in (_NEW_NEIGHBOUR, _REMOVED_NEIGHBOUR):
                self._note_neighbour(messages[begin:end], is_new=kind == _NEW_NEIGHBOUR)
            elif kind in _LINKS:
                self._forget_device(*_INDEX.unpack_from(messages, begin))
            elif kind in _ROUTES:
                self._forget_network(*routes.destination_of(messages[begin:end]))
            elif kind in _RULES:
                self._routes.clear()

    def note_loss(self) -> None:
        """Note that messages were lost."""
        self._is_listed = False

    def read(self) -> Neighbourhood:
        """Return what is known; the kernel is asked for the routes of new neighbours.

        Raises NodeError.
        """
        try:
            if not self._is_listed:
                self._list()
            neighbours = frozenset(self._reachable())
        except OSError as error:
            raise NodeError(f"neighbours cannot be listed: {error.args[-1]}") from error
        ports = (LearnedPort(*key, port) for key, port in self._ports.items())
        return Neighbourhood(neighbours, frozenset(ports))

    def _list(self) -> None:
        for known in (self._macs, self._ports, self._routes):
            known.clear()
        for family in (socket.AF_UNSPEC, _BRIDGE):
            for message in netlink.dump(_GET_NEIGHBOUR, _HEADER.pack(family, 0, 0, 0)):
                self._note_neighbour(message, is_new=True)
        self._is_listed = True

    def _note_neighbour(self, message: bytes, *, is_new: bool) -> None:
        family, ifindex, state, flags = _HEADER.unpack_from(message)
        found = netlink.attributes(message, _HEADER.size)
        mac, is_known = found.get(_MAC, b""), is_new and state & _KNOWN
        if family == _BRIDGE:
            self._note_port(ifindex, found, is_known=is_known and state != _PERMANENT)
        elif family in (socket.AF_INET, socket.AF_INET6) and not flags & _PROXY:
            key = ifindex, ip_address(found[_ADDRESS])
            self._macs.pop(key, None)
            if is_known and len(mac) == _MAC_BYTES and not key[1].is_link_local:
                self._macs[key] = mac.hex(":")

    def _note_port(self, port: int, found: dict[int, bytes], *, is_known: bool) -> None:
        """Note a bridge's forwarding entry; a permanent one is an address of the port itself."""
        if _MASTER not in found or _MAC not in found or any(found.get(_VLAN, b"")):
            return
        key = int.from_bytes(found[_MASTER], sys.byteorder), found[_MAC].hex(":")
        if is_known:
            self._ports[key] = port
        elif self._ports.get(key) == port:
            del self._ports[key]

    def _forget_device(self, ifindex: int) -> None:
        """Ask again for routes by a device; the kernel does not tell when those of IPv4 go with it.

        Addresses without a route may have one now.
        """
        for address, route in list(self._routes.items()):
            if route is None or route.ifindex == ifindex:
                del self._routes[address]

    def _forget_network(self, version: int, network: int, bits: int) -> None:
        for address in list(self._routes):
            shift = address.max_prefixlen - bits
            if address.version == version and int(address) >> shift == network >> shift:
                del self._routes[address]

    def _reachable(self) -> list[Neighbour]:
        former, self._routes = self._routes, {}
        found = []
        with netlink.route_socket() as kernel:
            for (ifindex, address), mac in self._macs.items():
                if address not in self._routes:
                    is_new = address not in former
                    route = routes.on_link(kernel, address) if is_new else former[address]
                    self._routes[address] = route
                route = self._routes[address]
                if route and route.ifindex == ifindex:
                    found.append(Neighbour(address, ifindex, mac, route.mtu))
        return found


class NeighbourWatch(DescriptorWorker):
    """Emit the neighbours at once and whenever they have changed, from a thread."""

    def __init__(self, emit: Callable[[Neighbourhood | SourceStatus], None]) -> None:
        super().__init__("neighbours")
        self._emit, self._table = emit, NeighbourTable()
        self._emitted: Neighbourhood | None = None
        self._changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._poll = Poller("neighbours", self._report, emit)

    def start(self) -> None:
        """Subscribe before the first listing, so that no change is missed."""
        self._changes.bind((0, _GROUPS))
        super().start()

    def stop(self) -> None:
        super().stop()
        self._changes.close()

    def run(self) -> None:
        while not self.stopped.is_set():
            if not self._poll():
                self._table.note_loss()
                self.stopped.wait(RELIST_SECONDS)
            elif self.wait([self._changes], math.inf):
                self._take_changes()

    def _report(self) -> None:
        found = self._table.read()
        if found != self._emitted:
            self._emit(found)
        self._emitted = found

    def _take_changes(self) -> None:
        """Take all messages so far; after a loss (ENOBUFS) everything is listed again."""
        try:
            while messages := self._changes.recv(1 << 16, socket.MSG_DONTWAIT):
                self._table.note(messages)
        except BlockingIOError:
            return
        except OSError:
            self._table.note_loss()
