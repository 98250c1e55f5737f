# SPDX-License-Identifier: Apache-2.0
"""All that a former kube-proxy left in this network namespace, and how to remove it.

Each leftover is removed in one step, so that no packet meets half of it. The order of the list
matters: rules that match an ipset are removed before the ipset. What kube-proxy set besides rules
(sysctls such as route_localnet, nfacct counters) is not found here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ebpflb.errors import NodeError
from ebpflb.model import virtual_servers
from ebpflb.model.iptables_rules import Removal
from ebpflb.model.kube_proxy import DEVICE, IPTABLES, NFT_TABLE, NODE_PORTS, SETS, is_chain
from ebpflb.node import ipvs, nft, xtables
from ebpflb.node.iptables import FAMILY_OF_TOOL, LEGACY, NFT_FAMILY, Tool, tools

_NFT_TABLES = {nft.Name("ip", NFT_TABLE), nft.Name("ip6", NFT_TABLE)}


class Leftover(NamedTuple):
    """One leftover, and what removes it; ``remove`` raises NodeError."""

    what: str
    remove: Callable[[], None]


@dataclass
class LeftoverSurvey:
    """``removable`` leftovers; ``retained``: used by others; ``unreadable``: may be leftovers."""

    removable: list[Leftover] = field(default_factory=list)
    retained: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def survey() -> LeftoverSurvey:
    """Finds all leftovers and changes nothing."""
    found = LeftoverSurvey()
    for table in sorted(nft.tables() & _NFT_TABLES):
        found.removable.append(Leftover(str(table), partial(nft.delete, table)))
    for tool in tools():
        _iptables(tool, found)
    _ipvs(found)
    for name in sorted(ipvs.sets() & SETS):
        found.removable.append(Leftover(f"ipset {name}", partial(ipvs.remove_set, name)))
    return found


def visible_rules() -> list[str]:
    """Where kube-proxy's rules are; the cost does not grow with their number."""
    names = [str(table) for table in nft.tables() & _NFT_TABLES]
    names += [f"chains of {tool.name}" for tool in tools() if _has_services(tool)]
    device = [] if ipvs.addresses(DEVICE) is None else [f"device {DEVICE}"]
    return sorted(names) + device


def _has_services(tool: Tool) -> bool:
    """Its modes by iptables and ipvs have KUBE-SERVICES in nat."""
    if tool.variant == LEGACY:
        return xtables.has_chain(FAMILY_OF_TOOL[tool.family], "nat", "KUBE-SERVICES")
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
    """The tables with rules of kube-proxy that cannot be read because the tool is missing."""
    if tool.command:
        return ""
    if tool.variant == LEGACY:
        there = [name for name in IPTABLES if name in xtables.tables(FAMILY_OF_TOOL[tool.family])]
    else:
        names = [nft.Name(NFT_FAMILY[tool.family], table) for table in IPTABLES]
        there = [name.table for name in names if any(map(is_chain, nft.chains(name)))]
    return f"the tables {', '.join(there)}" if there else ""


def _restore(tool: Tool, removal: Removal) -> None:
    """Tries once more if the table has changed since it was read."""
    try:
        tool.restore(removal.script)
    except NodeError:
        for again in map(Removal, tool.tables()):
            if again.table.name == removal.table.name and again:
                tool.restore(again.script)


def _ipvs(found: LeftoverSurvey) -> None:
    """kube-proxy's virtual servers, by its device's addresses and its sets of NodePorts."""
    addresses = ipvs.addresses(DEVICE)
    there = ipvs.servers()
    sets = ipvs.sets()
    ports = {
        protocol: {port for name in names if name in sets for port in ipvs.ports(name)}
        for protocol, names in NODE_PORTS.items()
    }
    ours, others = virtual_servers.split(there, addresses or set(), ports)
    if ours:
        connections = sum(server.open_connections for server in ours)
        what = f"{len(ours)} virtual servers of IPVS, with {connections} open connections"
        found.removable.append(Leftover(what, partial(ipvs.remove_servers, ours)))
    if others and (ours or addresses is not None):
        found.retained.append(f"virtual servers of IPVS that may be others': {_named(others)}")
    if addresses is not None:
        found.removable.append(Leftover(f"device {DEVICE}", partial(ipvs.remove_device, DEVICE)))


def _named(servers: list[virtual_servers.VirtualServer]) -> str:
    return ", ".join(map(str, servers))
