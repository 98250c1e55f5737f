# SPDX-License-Identifier: Apache-2.0
"""The addresses of this machine's interfaces, now and as they come and go (rtnetlink)."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from pyroute2 import IPRoute
from pyroute2.netlink.rtnl import RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR

from ebpflb.model.addresses import Address


@dataclass(frozen=True, slots=True)
class AddressesChanged:
    """All addresses that the interfaces have now."""

    addresses: frozenset[Address]


def current() -> frozenset[Address]:
    """All addresses of all interfaces in our network namespace.

    On a point-to-point link IFA_ADDRESS is the peer's; IFA_LOCAL, where it is there, is ours.
    """
    with IPRoute() as route:
        messages = list(route.get_addr())
    texts = (m.get_attr("IFA_LOCAL") or m.get_attr("IFA_ADDRESS") for m in messages)
    return frozenset(ip_address(text) for text in texts if text)


class Follower:
    """Tells of every change, from a thread of its own; the first list comes at once.

    The socket is a plain one: since 0.9 pyroute2's belong to the thread that made them.
    """

    def __init__(self, emit: Callable[[AddressesChanged], None]) -> None:
        self.emit = emit
        self.changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

    def start(self) -> None:
        """Subscribes before it lists, so that no change is missed."""
        self.changes.bind((0, RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR))
        self.emit(AddressesChanged(current()))
        threading.Thread(target=self._follow, name="addresses", daemon=True).start()

    def _follow(self) -> None:
        while True:
            self._wait()
            self.emit(AddressesChanged(current()))

    def _wait(self) -> None:
        """For a change, or for word that some were lost (ENOBUFS): both ask for a fresh list."""
        try:
            self.changes.recv(1 << 16)
        except OSError:
            time.sleep(1)
