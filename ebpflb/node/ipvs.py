# SPDX-License-Identifier: Apache-2.0
"""IPVS in this network namespace, the device that holds its addresses, and ipsets; by netlink.

Nothing here makes the kernel load a module: without /proc/net/ip_vs there is no server.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

from pyroute2 import IPVS, IPRoute, IPSet, IPVSService
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.ipset import IPSET_FLAG_LIST_SETNAME

from ebpflb.errors import NodeError
from ebpflb.model.addresses import Address
from ebpflb.model.services import PROTOCOLS
from ebpflb.model.virtual_servers import VirtualServer, parse

SERVERS = Path("/proc/net/ip_vs")


def servers() -> list[VirtualServer]:
    """All virtual servers that have an address."""
    return parse(SERVERS.read_text()) if SERVERS.exists() else []


def remove_servers(unused: list[VirtualServer]) -> None:
    """Ends the connections through them: IPVS drops packets without server. Raises NodeError."""
    with _node_errors("IPVS"), IPVS() as ipvs:
        for server in unused:
            address = {"addr": str(server.address), "port": server.port}
            ipvs.service("del", IPVSService(**address, protocol=PROTOCOLS[server.protocol]))


def addresses(device: str) -> set[Address] | None:
    """The addresses of a device; None if there is no such device. Raises NodeError."""
    with _node_errors(device), IPRoute() as route:
        index = route.link_lookup(ifname=device)
        if not index:
            return None
        found = list(route.get_addr(index=index[0]))
    return {ip_address(message.get_attr("IFA_ADDRESS")) for message in found}


def remove_device(device: str) -> None:
    """Raises NodeError."""
    with _node_errors(device), IPRoute() as route:
        for index in route.link_lookup(ifname=device):
            route.link("del", index=index)


def sets() -> set[str]:
    """The names of all ipsets; none if the kernel does not support removed."""
    try:
        with IPSet() as ipset:
            found = list(ipset.list(flags=IPSET_FLAG_LIST_SETNAME))
    except (NetlinkError, OSError):
        return set()
    return {message.get_attr("IPSET_ATTR_SETNAME") for message in found}


def ports(name: str) -> set[int]:
    """The ports in a set of ports, or of addresses with ports (bitmap:port, hash:ip,port)."""
    with _node_errors(name), IPSet() as ipset:
        found = list(ipset.list(name))
    members = [m.get_attr("IPSET_ATTR_ADT") for m in found]
    return {
        entry.get_attr("IPSET_ATTR_PORT_FROM")
        for member in members
        if member
        for entry in member.get_attrs("IPSET_ATTR_DATA")
    }


def remove_set(name: str) -> None:
    """Raises NodeError, also if a rule still matches it."""
    with _node_errors(f"ipset {name}"), IPSet() as ipset:
        ipset.destroy(name)


@contextmanager
def _node_errors(what: str) -> Iterator[None]:
    try:
        yield
    except NetlinkError as error:
        raise NodeError(f"{what}: {error.args[-1]}") from error
    except OSError as error:
        raise NodeError(f"{what}: {error.strerror}") from error
