# SPDX-License-Identifier: Apache-2.0
"""A network namespace that is connected to this one as a pod is, and removes itself.

It has no name: a thread is in it, and when the thread ends, however its process ends, the kernel
removes the namespace, the pair of veth devices, and their routes and neighbours. Each of its
addresses has a host route to the device, and both ends know each other's link address, so neither
an address of the node nor a sysctl is needed.
"""

import errno
import os
import secrets
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, TypeVar

from pyroute2.iproute import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from ebpflb.errors import NodeError, in_words
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.node.namespaces import OWN_NETNS
from ebpflb.model.addresses import Address, Family

VETH_PREFIX = "ebpflb-dr"  # of the devices' names here; the other end is eth0
GATEWAYS = {Family.IPV4: "169.254.1.1", Family.IPV6: "fe80::1"}  # unused addresses
_NODAD = 0x02  # IFA_F_NODAD
_PERMANENT = 0x80  # NUD_PERMANENT
_SCOPE_LINK = 253
_UP_SECONDS = 5.0

_T = TypeVar("_T")


class ScratchNamespace:
    """The namespace; its name is that of the device here. ``close`` removes it."""

    def __init__(self, addresses: Collection[Address]) -> None:
        """Create the namespace. Raises NodeError that says what is missing."""
        self.name = VETH_PREFIX + secrets.token_hex(3)
        self.addresses = {Family(it.version): it for it in addresses}
        self.index = 0
        self._thread = ThreadPoolExecutor(1, "scratch")
        try:
            self._thread.submit(namespaces.unshare, namespaces.NEW_NETWORK).result()
            self._join()
        except NodeError:
            self.close()
            raise
        except (OSError, NetlinkError) as error:
            self.close()
            raise NodeError(f"no scratch namespace can be made: {_why(error)}") from error

    def call(self, function: Callable[[], _T]) -> _T:
        """Call the function in the namespace and return its result; one call at a time."""
        return self._thread.submit(function).result()

    def close(self) -> None:
        """Remove the devices at once: the kernel removes a namespace some time later."""
        with suppress(OSError, NetlinkError), IPRoute() as route:
            if self.index:
                route.link("del", index=self.index)
        self._thread.shutdown()

    def _join(self) -> None:
        """Connect the namespace, with link addresses drawn here.

        udev would soon change a link address that the kernel has drawn.
        """
        with IPRoute() as route:
            namespace = self.call(lambda: os.open(OWN_NETNS, os.O_RDONLY | os.O_CLOEXEC))
            try:
                peer = {"ifname": "eth0", "net_ns_fd": namespace, "address": _link_address()}
                link = {"ifname": self.name, "address": _link_address()}
                route.link("add", kind="veth", peer=peer, **link)
            finally:
                os.close(namespace)
            self.index = route.link_lookup(ifname=self.name)[0]
            route.link("set", index=self.index, state="up")
            here = route.get_links(self.index)[0].get_attr("IFLA_ADDRESS")
            there = self.call(lambda: _set_up(self.addresses, here))
            for address in self.addresses.values():
                length = address.max_prefixlen
                words = {"dst": f"{address}/{length}", "oif": self.index, "scope": _SCOPE_LINK}
                route.route("add", **words)
                _know(route, self.index, str(address), there)
        _wait_until_up(self.name)
        self.call(lambda: _wait_until_up("eth0"))


def _link_address() -> str:
    """Return a random link address: locally administered, unicast."""
    drawn = [0x02 | secrets.randbits(8) & 0xFC, *secrets.token_bytes(5)]
    return ":".join(f"{byte:02x}" for byte in drawn)


def _why(error: Exception) -> str:
    number = error.args[0] if error.args else 0
    if number in (errno.EPERM, errno.EACCES):
        return "run as root, or grant CAP_SYS_ADMIN and CAP_NET_ADMIN"
    if number == errno.EEXIST:
        return "its addresses are routed already: try again when no other `ebpflb doctor` runs"
    return str(error.args[-1]) if isinstance(error, NetlinkError) else in_words(error)


def _set_up(addresses: dict[Family, Address], gateway_link: str) -> str:
    """Set up the device in the namespace; return its link address."""
    with IPRoute() as route:
        index = route.link_lookup(ifname="eth0")[0]
        route.link("set", index=route.link_lookup(ifname="lo")[0], state="up")
        route.link("set", index=index, state="up")
        for family, address in addresses.items():
            nodad = {"flags": _NODAD} if family is Family.IPV6 else {}
            route.addr(
                "add", index=index, address=str(address), prefixlen=address.max_prefixlen, **nodad
            )
            gateway = GATEWAYS[family]
            _know(route, index, gateway, gateway_link)
            dst = "default" if family is Family.IPV4 else "::/0"
            route.route("add", dst=dst, gateway=gateway, oif=index, flags=["onlink"])
        return str(route.get_links(index)[0].get_attr("IFLA_ADDRESS"))


def _wait_until_up(device: str) -> None:
    """Wait until the device is up: the kernel drops packets sent before it notices both ends."""
    until = time.monotonic() + _UP_SECONDS
    with IPRoute() as route:
        (index,) = route.link_lookup(ifname=device)
        while route.get_links(index)[0].get_attr("IFLA_OPERSTATE") != "UP":
            if time.monotonic() > until:
                raise NodeError("no scratch namespace can be made: its device does not come up")
            time.sleep(0.01)


def _know(route: Any, index: int, neighbour: str, link_address: str) -> None:
    family = {4: 2, 6: 10}[ip_address(neighbour).version]
    words = {"dst": neighbour, "lladdr": link_address, "ifindex": index, "state": _PERMANENT}
    route.neigh("add", family=family, **words)
