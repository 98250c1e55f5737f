# SPDX-License-Identifier: Apache-2.0
"""A kube-proxy in this network namespace: whether one runs, what one left, and its removal.

Each leftover is removed in one step, so that no packet meets half of it. The order of the list
matters: rules that guard the addresses of kube-ipvs0 are removed after it, and before the ipsets
that they match. While IPVS has connections everything of that mode stays. Other settings of
kube-proxy (sysctls of its other modes, nfacct counters) are not found here.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from ebpflb.errors import NodeError, instead_of_os_error
from ebpflb.kernel import netlink
from ebpflb.kernel.netfilter import firewall, nft
from ebpflb.kernel.netfilter.firewall import FAMILY_OF_TOOL, LEGACY, NFT_FAMILY, Tool, tools
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.node.device_watch import LINK_HEADER, addresses_at
from ebpflb.kernel.node.sysctls import read_sysctl, write_sysctl
from ebpflb.model import kube_proxy
from ebpflb.model.addresses import Address
from ebpflb.model.events import SourceStatus
from ebpflb.model.kube_proxy import (
    DEVICE,
    IPTABLES,
    IPVS_SYSCTLS,
    NFT_TABLE,
    NODE_PORTS,
    PROXY_MODE_PORT,
    PROXY_MODES,
    SETS,
    Detection,
    End,
    Removal,
    VirtualServer,
    is_chain,
    parse_datagrams,
    parse_virtual_servers,
)
from ebpflb.model.services import PROTOCOLS
from ebpflb.workers import PeriodicWorker, Poller

# IPVS in this network namespace, the device that holds its addresses, and ipsets; by netlink.
#
# No call here makes the kernel load a module: without /proc/net/ip_vs there is no server.

SERVERS, FLOWS = Path("/proc/net/ip_vs"), Path("/proc/net/ip_vs_conn")
_NAMES_ONLY = 1 << 1  # IPSET_FLAG_LIST_SETNAME
_REMOVE_LINK = 17  # RTM_DELLINK


def virtual_servers() -> list[VirtualServer]:
    """Return all virtual servers that have an address."""
    return parse_virtual_servers(SERVERS.read_text()) if SERVERS.exists() else []


def datagrams_by_ipvs() -> dict[tuple[End, End], End]:
    """Return the servers of IPVS's UDP flows, by client and virtual server.

    Empty if conntrack does not see them (net.ipv4.vs.conntrack): replies to the node's own sockets,
    to which IPVS gives a cluster IP as their address, do not arrive then.
    """
    if read_sysctl("net/ipv4/vs/conntrack") != "1" or not FLOWS.exists():
        return {}
    return parse_datagrams(FLOWS.read_text())


def remove_virtual_servers(unused: list[VirtualServer]) -> None:
    """Remove servers and end their connections: IPVS drops packets without server.

    Raises NodeError.
    """
    with _pyroute2("IPVS"):
        from pyroute2.ipvs import IPVS, IPVSService

        with IPVS() as ipvs:
            for server in unused:
                address = {"addr": str(server.address), "port": server.port}
                ipvs.service("del", IPVSService(**address, protocol=PROTOCOLS[server.protocol]))


def dummy_addresses(device: str) -> set[Address] | None:
    """Return the addresses of a device; None if there is no such device. Raises NodeError."""
    try:
        index = socket.if_nametoindex(device)
    except OSError:
        return None
    with instead_of_os_error(device):
        return addresses_at(index)


def remove_dummy_device(device: str) -> None:
    """Remove the device. Raises NodeError."""
    with instead_of_os_error(device), netlink.route_socket() as kernel:
        header = LINK_HEADER.pack(0, 0, socket.if_nametoindex(device), 0, 0)
        netlink.request(kernel, _REMOVE_LINK, header, netlink.ACK)


def ipsets() -> set[str]:
    """Return the names of all ipsets; none if the kernel does not support them."""
    with suppress(NodeError), _ipset("ipsets") as ipset:
        found = list(ipset.list(flags=_NAMES_ONLY))
        return {message.get_attr("IPSET_ATTR_SETNAME") for message in found}
    return set()


def service_ports(name: str) -> set[int]:
    """Return the ports in a set of ports, or of addresses with ports.

    The types of these sets are bitmap:port and hash:ip,port.
    """
    with _ipset(name) as ipset:
        members = [m.get_attr("IPSET_ATTR_ADT") for m in ipset.list(name)]
    return {
        entry.get_attr("IPSET_ATTR_PORT_FROM")
        for member in members
        if member
        for entry in member.get_attrs("IPSET_ATTR_DATA")
    }


def remove_ipset(name: str) -> None:
    """Remove the ipset. Raises NodeError, also if a rule still matches it."""
    with _ipset(f"ipset {name}") as ipset:
        ipset.destroy(name)


@contextmanager
def _ipset(what: str) -> Iterator[Any]:
    with _pyroute2(what):
        from pyroute2.ipset import IPSet

        with IPSet() as ipset:
            yield ipset


@contextmanager
def _pyroute2(what: str) -> Iterator[None]:
    """Raise NodeError for errors of pyroute2, which takes 0.2 s to import."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with instead_of_os_error(what):
            yield
    except NetlinkError as error:
        raise NodeError(f"{what}: {error.args[-1]}") from error


_MOST_NAMED = 4  # in one line
_NFT_TABLES = {nft.Name("ip", NFT_TABLE), nft.Name("ip6", NFT_TABLE)}


class Leftover(NamedTuple):
    """One leftover, and its removal; ``remove`` raises NodeError."""

    what: str
    remove: Callable[[], None]


class LeftoverSurvey(Struct):
    """All leftovers.

    ``retained`` ones are used by other programs; ``unreadable`` ones may be leftovers. ``in_use``
    says which connections IPVS still has, and that all of its mode stays for them; else "".
    """

    removable: list[Leftover] = []
    retained: list[str] = []
    unreadable: list[str] = []
    in_use: str = ""


class IpvsState(NamedTuple):
    """What kube-proxy's mode ipvs has on this node.

    ``servers``: its virtual servers; ``others``: those of other programs; ``addresses``: of
    kube-ipvs0, None without that device; ``sysctls``: those that have mode ipvs's value.
    """

    servers: list[VirtualServer]
    others: list[VirtualServer]
    addresses: set[Address] | None
    sysctls: list[str]

    @property
    def summary(self) -> str:
        """What is there in words; "" if nothing is."""
        if not self.servers and self.addresses is None:
            return ""
        words = [
            f"virtual servers: {len(self.servers)}",
            f"connections: {self.connections or 'none'}",
            f"addresses of {DEVICE}: {len(self.addresses or ())}",
        ]
        words += [f"{name.replace('/', '.')}={IPVS_SYSCTLS[name][0]}" for name in self.sysctls]
        return "; ".join(words)

    @property
    def connections(self) -> str:
        """The servers that have connections, each with their number; "" if there are none."""
        used = [f"{each} ({each.connections})" for each in self.servers if each.connections]
        more = f" and {len(used) - _MOST_NAMED} more" if len(used) > _MOST_NAMED else ""
        return f"{', '.join(used[:_MOST_NAMED])}{more}"


def ipvs_state() -> IpvsState:
    """Return the state; kube-proxy's servers are at its device's addresses or in its sets of
    NodePorts. Raises NodeError.
    """
    addresses, sets = dummy_addresses(DEVICE), ipsets()
    ports = {
        protocol: {port for name in names if name in sets for port in service_ports(name)}
        for protocol, names in NODE_PORTS.items()
    }
    ours, others = kube_proxy.split(virtual_servers(), addresses or set(), ports)
    changed = [name for name, (value, _) in IPVS_SYSCTLS.items() if read_sysctl(name) == value]
    return IpvsState(ours, others, addresses, [] if addresses is None else changed)


def survey(*, force: bool = False) -> LeftoverSurvey:
    """Find all leftovers without changing anything; with ``force`` those that IPVS uses, too."""
    found = LeftoverSurvey()
    for table in sorted(nft.tables() & _NFT_TABLES):
        found.removable.append(Leftover(str(table), partial(nft.delete, table)))
    state = ipvs_state()
    if state.connections and not force:
        found.in_use = state.connections
        return found
    _ipvs(state, found)
    for tool in tools():
        _iptables(tool, found)
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
        return firewall.legacy_has_chain(FAMILY_OF_TOOL[tool.family], "nat", "KUBE-SERVICES")
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
            remove = partial(tool.restore, removal.script)
            found.removable.append(Leftover(f"{name}: {removal.summary}", remove))
        if removal.retained:
            found.retained.append(f"{name}: {removal.retained}")


def _unreadable(tool: Tool) -> str:
    """Return the tables with rules of kube-proxy that are unreadable without their tool."""
    if tool.command:
        return ""
    if tool.variant == LEGACY:
        there = [
            name for name in IPTABLES if name in firewall.legacy_tables(FAMILY_OF_TOOL[tool.family])
        ]
    else:
        names = [nft.Name(NFT_FAMILY[tool.family], table) for table in IPTABLES]
        there = [name.table for name in names if any(map(is_chain, nft.chains(name)))]
    return f"the tables {', '.join(there)}" if there else ""


def _ipvs(state: IpvsState, found: LeftoverSurvey) -> None:
    """Find virtual servers, sysctls, and last the device, by which the next run finds these."""
    if state.servers:
        count = sum(server.connections for server in state.servers)
        what = f"{len(state.servers)} virtual servers of IPVS, with {count} connections"
        found.removable.append(Leftover(what, partial(remove_virtual_servers, state.servers)))
    if state.others and (state.servers or state.addresses is not None):
        named = ", ".join(map(str, state.others))
        found.retained.append(f"virtual servers of IPVS that may be others': {named}")
    for name in state.sysctls:
        value, usual = IPVS_SYSCTLS[name]
        what = f"{name.replace('/', '.')}={value} (the kernel's default is {usual})"
        if name.startswith("net/ipv4/conf") or state.others:
            found.retained.append(f"{what}: set by mode ipvs, or by another program that needs it")
        else:
            found.removable.append(Leftover(what, partial(write_sysctl, name, usual)))
    if state.addresses is not None:
        found.removable.append(Leftover(f"device {DEVICE}", partial(remove_dummy_device, DEVICE)))


# Detect a kube-proxy in this network namespace, or its leftovers (kube-proxy.md 13.2, 17).
#
# A kube-proxy is detected by its process, which is invisible inside a pod; by a program that
# answers /proxyMode on loopback with a mode of kube-proxy, which may be part of another program, as
# in k3s; or by its rules, if they return after they were gone.


_NAME = "kube-proxy"
_INTERVAL_SECONDS = 60.0
_LOOPBACKS = ("127.0.0.1", "::1")
TIMEOUT = 1.0  # seconds
_MOST_BYTES = 4096  # of an answer, with its head


def detect() -> Detection:
    """Return everything that can be detected now. Raises NodeError if something cannot be read."""
    answers = tuple(_proxy_modes())
    rules = tuple(visible_rules())
    unseen = not namespaces.sees_the_machine()
    return Detection(tuple(sorted(_pids())), answers, rules, unseen=unseen)


class KubeProxyWatch(PeriodicWorker):
    """Emit the first detection at once, and then every one that differs from the last.

    While something cannot be read the last detection stays.
    """

    patience = 0.0  # what is read may take seconds, and changes nothing

    def __init__(
        self, emit: Callable[[Detection | SourceStatus], None], seconds: float = _INTERVAL_SECONDS
    ) -> None:
        super().__init__(_NAME, seconds, steady=True)
        self.emit = emit
        self._poll = Poller(_NAME, self._report, emit)
        self._reported: Detection | None = None

    def turn(self) -> None:
        self._poll()

    def _report(self) -> None:
        found = detect().compared_with(self._reported)
        if found != self._reported:
            self._reported = found
            self.emit(found)


def _pids() -> Iterator[int]:
    """Yield kube-proxy's processes in this network namespace: a machine may have several nodes."""
    for process in namespaces.members(namespaces.OWN_NETNS):
        with suppress(OSError):  # the process has ended, or may not be read
            if _is_kube_proxy(process):
                yield int(process.name)


def _is_kube_proxy(process: Path) -> bool:
    comm = (process / "comm").read_bytes().strip()
    return comm == _NAME.encode() or (process / "exe").readlink().name == _NAME


def _proxy_modes() -> Iterator[tuple[str, str]]:
    """Yield addresses and modes of programs that answer as kube-proxy; ebpflb answers "ebpf"."""
    for address in _LOOPBACKS:
        mode = _proxy_mode(address)
        if mode in PROXY_MODES:
            where = f"[{address}]" if ":" in address else address
            yield f"{where}:{PROXY_MODE_PORT}", mode


def _proxy_mode(address: str) -> str:
    try:
        with closing(HTTPConnection(address, PROXY_MODE_PORT, timeout=TIMEOUT)) as connection:
            connection.request("GET", "/proxyMode")
            body = connection.getresponse().read(_MOST_BYTES)
    except (OSError, HTTPException):
        return ""
    return body.decode("ascii", "replace").strip()
