# SPDX-License-Identifier: Apache-2.0
"""Everything that a former kube-proxy left in this network namespace, and its removal.

Each leftover is removed in one step, so that no packet meets half of it. The order of the list
matters: rules that match an ipset are removed before the ipset. Other settings of kube-proxy
(sysctls such as route_localnet, nfacct counters) are not found here.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ebpflb.errors import NodeError
from ebpflb.kernel import pyroute2_parts
from ebpflb.kernel.netfilter import iptables, nft
from ebpflb.kernel.netfilter.iptables import FAMILY_OF_TOOL, LEGACY, NFT_FAMILY, Tool, tools
from ebpflb.model import kube_proxy
from ebpflb.model.addresses import Address
from ebpflb.model.kube_proxy import (
    DEVICE,
    IPTABLES,
    NFT_TABLE,
    NODE_PORTS,
    SETS,
    Removal,
    VirtualServer,
    is_chain,
    parse_virtual_servers,
)
from ebpflb.model.services import PROTOCOLS

# IPVS in this network namespace, the device that holds its addresses, and ipsets; by netlink.
#
# No call here makes the kernel load a module: without /proc/net/ip_vs there is no server.

SERVERS = Path("/proc/net/ip_vs")
_NAMES_ONLY = 1 << 1  # IPSET_FLAG_LIST_SETNAME


def virtual_servers() -> list[VirtualServer]:
    """Return all virtual servers that have an address."""
    return parse_virtual_servers(SERVERS.read_text()) if SERVERS.exists() else []


def remove_virtual_servers(unused: list[VirtualServer]) -> None:
    """Remove servers and end their connections: IPVS drops packets without server.

    Raises NodeError.
    """
    with _node_errors("IPVS"), pyroute2_parts.IPVS() as ipvs:
        for server in unused:
            address = {"addr": str(server.address), "port": server.port}
            ipvs.service(
                "del", pyroute2_parts.IPVSService(**address, protocol=PROTOCOLS[server.protocol])
            )


def dummy_addresses(device: str) -> set[Address] | None:
    """Return the addresses of a device; None if there is no such device. Raises NodeError."""
    try:
        index = socket.if_nametoindex(device)
    except OSError:
        return None
    with _node_errors(device), pyroute2_parts.IPRoute() as route:
        found = list(route.get_addr(index=index))
    return {ip_address(message.get_attr("IFA_ADDRESS")) for message in found}


def remove_dummy_device(device: str) -> None:
    """Remove the device. Raises NodeError."""
    with _node_errors(device), pyroute2_parts.IPRoute() as route:
        for index in route.link_lookup(ifname=device):
            route.link("del", index=index)


def ipsets() -> set[str]:
    """Return the names of all ipsets; none if the kernel does not support them."""
    try:
        with pyroute2_parts.IPSet() as ipset:
            found = list(ipset.list(flags=_NAMES_ONLY))
    except (pyroute2_parts.NetlinkError, OSError):
        return set()
    return {message.get_attr("IPSET_ATTR_SETNAME") for message in found}


def service_ports(name: str) -> set[int]:
    """Return the ports in a set of ports, or of addresses with ports.

    The types of these sets are bitmap:port and hash:ip,port.
    """
    with _node_errors(name), pyroute2_parts.IPSet() as ipset:
        found = list(ipset.list(name))
    members = [m.get_attr("IPSET_ATTR_ADT") for m in found]
    return {
        entry.get_attr("IPSET_ATTR_PORT_FROM")
        for member in members
        if member
        for entry in member.get_attrs("IPSET_ATTR_DATA")
    }


def remove_ipset(name: str) -> None:
    """Remove the ipset. Raises NodeError, also if a rule still matches it."""
    with _node_errors(f"ipset {name}"), pyroute2_parts.IPSet() as ipset:
        ipset.destroy(name)


@contextmanager
def _node_errors(what: str) -> Iterator[None]:
    try:
        yield
    except pyroute2_parts.NetlinkError as error:
        raise NodeError(f"{what}: {error.args[-1]}") from error
    except OSError as error:
        raise NodeError(f"{what}: {error.strerror}") from error


_NFT_TABLES = {nft.Name("ip", NFT_TABLE), nft.Name("ip6", NFT_TABLE)}


class Leftover(NamedTuple):
    """One leftover, and its removal; ``remove`` raises NodeError."""

    what: str
    remove: Callable[[], None]


class LeftoverSurvey(Struct):
    """All leftovers.

    ``retained`` ones are used by other programs; ``unreadable`` ones may be leftovers.
    """

    removable: list[Leftover] = []
    retained: list[str] = []
    unreadable: list[str] = []


def survey() -> LeftoverSurvey:
    """Find all leftovers without changing anything."""
    found = LeftoverSurvey()
    for table in sorted(nft.tables() & _NFT_TABLES):
        found.removable.append(Leftover(str(table), partial(nft.delete, table)))
    for tool in tools():
        _iptables(tool, found)
    _ipvs(found)
    for name in sorted(ipsets() & SETS):
        found.removable.append(Leftover(f"ipset {name}", partial(remove_ipset, name)))
    return found


def visible_rules() -> list[str]:
    """Return where kube-proxy's rules are; the cost does not grow with their number."""
    names = [str(table) for table in nft.tables() & _NFT_TABLES]
    names += [f"chains of {tool.name}" for tool in tools() if _has_services(tool)]
    device = [] if dummy_addresses(DEVICE) is None else [f"device {DEVICE}"]
    return sorted(names) + device


def _has_services(tool: Tool) -> bool:
    """Whether the nat table has KUBE-SERVICES, as in kube-proxy's modes iptables and ipvs."""
    if tool.variant == LEGACY:
        return iptables.legacy_has_chain(FAMILY_OF_TOOL[tool.family], "nat", "KUBE-SERVICES")
    return nft.has_chain(nft.Name(NFT_FAMILY[tool.family], "nat"), "KUBE-SERVICES")


def _iptables(tool: Tool, found: LeftoverSurvey) -> None:
    unreadable = _unreadable(tool)
    if unreadable:
        found.unreadable.append(f"{unreadable} of {tool.name}: it is not installed here")
    if not tool.command:
        return
    try:
        removals = [Removal(table) for table in tool.tables()]
    except NodeError as error:
        found.unreadable.append(str(error))
        return
    for removal in removals:
        name = f"{tool.name}, table {removal.table.name}"
        if removal:
            found.removable.append(
                Leftover(f"{name}: {removal.summary}", partial(_restore, tool, removal))
            )
        if removal.retained:
            found.retained.append(f"{name}: {removal.retained}")


def _unreadable(tool: Tool) -> str:
    """Return the tables with rules of kube-proxy that are unreadable without their tool."""
    if tool.command:
        return ""
    if tool.variant == LEGACY:
        there = [
            name for name in IPTABLES if name in iptables.legacy_tables(FAMILY_OF_TOOL[tool.family])
        ]
    else:
        names = [nft.Name(NFT_FAMILY[tool.family], table) for table in IPTABLES]
        there = [name.table for name in names if any(map(is_chain, nft.chains(name)))]
    return f"the tables {', '.join(there)}" if there else ""


def _restore(tool: Tool, removal: Removal) -> None:
    """Apply the removal; try once more if the table has changed since it was read."""
    try:
        tool.restore(removal.script)
    except NodeError:
        for again in map(Removal, tool.tables()):
            if again.table.name == removal.table.name and again:
                tool.restore(again.script)


def _ipvs(found: LeftoverSurvey) -> None:
    """Find kube-proxy's virtual servers, by its device's addresses and its sets of NodePorts."""
    addresses = dummy_addresses(DEVICE)
    there = virtual_servers()
    sets = ipsets()
    ports = {
        protocol: {port for name in names if name in sets for port in service_ports(name)}
        for protocol, names in NODE_PORTS.items()
    }
    ours, others = kube_proxy.split(there, addresses or set(), ports)
    if ours:
        connections = sum(server.open_connections for server in ours)
        what = f"{len(ours)} virtual servers of IPVS, with {connections} open connections"
        found.removable.append(Leftover(what, partial(remove_virtual_servers, ours)))
    if others and (ours or addresses is not None):
        found.retained.append(f"virtual servers of IPVS that may be others': {_named(others)}")
    if addresses is not None:
        found.removable.append(Leftover(f"device {DEVICE}", partial(remove_dummy_device, DEVICE)))


def _named(servers: list[kube_proxy.VirtualServer]) -> str:
    return ", ".join(map(str, servers))
