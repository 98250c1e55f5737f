# SPDX-License-Identifier: Apache-2.0
"""Firewall rules in one form, read by iptables' tools or nft, whichever knows them.

A rule is a list of options, conditions and actions, with the names that iptables-save or nft gives
them.
"""

import ctypes
import json
import os
import re
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any

from msgspec import Struct

from ebpflb import child
from ebpflb.errors import NodeError, instead_of_os_error
from ebpflb.kernel.netfilter import nft
from ebpflb.model import kube_proxy
from ebpflb.model.addresses import number, parse_address, parse_network
from ebpflb.model.kube_proxy import NFT_TABLE, IptablesTable, Option, parse_rules, read_options
from ebpflb.model.nodes import Condition, Ranges
from ebpflb.model.services import Protocol

NAT_DST = -100  # the priority of iptables' table nat (uapi/linux/netfilter_ipv4.h)

# The destination of a packet, now and before NAT, as iptables and nft name it.
_ORIGINAL_ADDRESSES = {"--ctorigdst", "ip daddr", "ip6 daddr"}
_ORIGINAL = {*_ORIGINAL_ADDRESSES, "--ctorigdstport", "proto-dst"}
_ADDRESSES = {"-d", "--dst-range", "daddr", *_ORIGINAL_ADDRESSES}
_PORTS = {"--dport", "--dports", "--ctorigdstport", "dport", "proto-dst"}
_PROTOCOLS = {"-p", "protocol", "nexthdr", "l4proto"}
_UNTRACKING = {"--notrack", "notrack"}  # of iptables' target CT, and of nft
NOT_READ = Option("-d", "a condition that is not read")
UNREAD_RULE = Option("-d", "a rule that is not read")
STATES = frozenset({"new", "established", "related", "invalid", "untracked"})  # conntrack's
_ANY_STATE = Option("state", ",".join(STATES))


class Rule(Struct, frozen=True, dict=True):
    """A rule; ``text`` shows it to the operator, ``sets`` are nft's named ones that it uses."""

    text: str
    options: tuple[Option, ...]
    sets: frozenset[str] = frozenset()

    @cached_property
    def names(self) -> set[str]:
        return {option.name for option in self.options}

    @cached_property
    def targets(self) -> set[str]:
        """The actions, and the chains that the rule jumps to."""
        return {option.value for option in self.options if option.name in ("-j", "-g")}

    @cached_property
    def conditions(self) -> list[Condition]:
        """The conditions on the destination. Raises ValueError if one cannot be read."""
        return [
            Condition(name in _ADDRESSES, _ranges(value, is_port=name in _PORTS), negated)
            for name, value, negated in self.options
            if name in _ADDRESSES | _PORTS
        ]

    @property
    def asks_for_original(self) -> bool:
        """Whether the rule asks for the destination before NAT, which conntrack knows."""
        return not _ORIGINAL.isdisjoint(self.names)

    def matches(self, protocol: int, address: int, port: int) -> bool:
        """Whether the rule matches this destination; its other conditions are not considered."""
        holds = all(condition.holds(address, port) for condition in self.conditions)
        return holds and self.is_for(protocol)

    def is_for(self, protocol: int) -> bool:
        """Whether the rule matches packets of this protocol."""
        names = {"all", str(protocol), Protocol(protocol).name.lower()}
        return all(
            names.isdisjoint(option.value.split(",")) == option.negated
            for option in self.options
            if option.name in _PROTOCOLS
        )

    @property
    def exempts(self) -> bool:
        """Whether the rule exempts packets from conntrack."""
        return "NOTRACK" in self.targets or not _UNTRACKING.isdisjoint(self.names)


class Chain(Struct):
    """``hook`` is netfilter's name in lower case, "" for a chain that only other chains jump to.

    Only base chains have a ``policy``: ACCEPT or DROP.
    """

    name: str
    hook: str = ""
    priority: int = 0
    is_nat: bool = False
    policy: str = ""
    rules: list[Rule] = []


class Table(Struct):
    """``title`` names the table: "table inet filter", "iptables-legacy, table nat".

    ``family`` is that of its packets, as nft names it; ``name`` that of the kernel's table.
    """

    title: str
    chains: dict[str, Chain] = {}
    family: str = "inet"
    name: str = ""

    def reached_from(self, chain: Chain) -> Iterator[tuple[str, Rule]]:
        """Yield the rules of a chain and of those that it leads to, each with its chain's name;
        none of kube-proxy's chains.
        """
        waiting = [chain.name]
        for name in waiting:
            for rule in self.chains[name].rules:
                yield name, rule
                found = rule.targets & self.chains.keys()
                waiting += [it for it in found.difference(waiting) if not kube_proxy.is_chain(it)]


@lru_cache(maxsize=1024)
def _ranges(values: str, *, is_port: bool) -> Ranges:
    """Parse numbers, networks, and ranges of numbers, separated by commas. Raises ValueError."""
    parse = _port_range if is_port else _address_range
    return tuple(parse(value) for value in values.split(",") if value)


def _port_range(text: str) -> tuple[int, int]:
    first, _, last = text.replace(":", "-").partition("-")
    return int(first), int(last or first)


def _address_range(text: str) -> tuple[int, int]:
    if "/" in text:
        network = parse_network(text)
        return number(network.network_address), number(network.broadcast_address)
    first, _, last = text.partition("-")
    return number(parse_address(first)), number(parse_address(last or first))


# iptables in this network namespace: both families, in the legacy and the nf_tables variant.
#
# Only iptables' own tools can read and write its rules. `iptables` may be either variant, so the
# tool is asked; a machine may also have `iptables-legacy` and `iptables-nft`.


# Find a chain of iptables-legacy by asking the kernel, without the tool.
#
# iptables-legacy needs CAP_NET_RAW and a lock file; the same getsockopt(2) works on any socket with
# CAP_NET_ADMIN (uapi/linux/netfilter_ipv4/ip_tables.h, ip6_tables.h). In the table, the name of a
# chain is the error of its first entry.

_INFO, _ENTRIES = 64, 65  # IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES; the same for IPv6
_TABLE_NAME = struct.Struct("=32s")
_SIZED = struct.Struct("=32sI4x")  # struct ipt_get_entries, before its entries
_INFO_LENGTH = 84  # struct ipt_getinfo; its last number is the size of the entries
# Where an entry has its length (next_offset) and its counters.
_OFFSETS: dict[int, tuple[int, int]] = {AF_INET: (90, 96), AF_INET6: (142, 152)}
_COUNTERS_SIZE = 16
_MOST_READ = 1 << 16  # bytes
_CHAIN = rb"ERROR\0.{24}%s\0"  # struct xt_error_target: 29 bytes of its name, a revision, the error
_LEVELS: dict[int, int] = {socket.AF_INET: socket.IPPROTO_IP, socket.AF_INET6: socket.IPPROTO_IPV6}
_LEGACY_TABLES: dict[int, Path] = {
    socket.AF_INET: Path("/proc/thread-self/net/ip_tables_names"),
    socket.AF_INET6: Path("/proc/thread-self/net/ip6_tables_names"),
}

_libc = ctypes.CDLL(None, use_errno=True)


def legacy_tables(family: int) -> set[str]:
    """Return the existing tables in this thread's network namespace. Raises NodeError.

    Reading a table that does not exist would create it.
    """
    names = _LEGACY_TABLES[family]
    with instead_of_os_error(str(names)):
        return set(names.read_text().split()) if names.exists() else set()


def legacy_has_chain(family: int, table: str, chain: str) -> bool:
    """Whether the table exists and has the chain. Raises NodeError if it cannot be read."""
    if table not in legacy_tables(family):
        return False
    with instead_of_os_error(f"table {table} of iptables-legacy"):
        entries = read_table(family, table)
    return re.search(_CHAIN % re.escape(chain.encode()), entries, re.DOTALL) is not None


def read_table(family: int, table: str) -> bytes:
    with socket.socket(family, socket.SOCK_DGRAM) as socket_:
        level, info = _LEVELS[family], _info(socket_, family, table)
        (size,) = struct.unpack_from("=I", info, _INFO_LENGTH - 4)
        head = _SIZED.pack(table.encode(), size)
        return _getsockopt(socket_, level, _ENTRIES, head, len(head) + size)


def legacy_size(family: int, table: str) -> bytes:
    """Return how many entries the table has, and of which size; empty if it does not exist.

    Raises NodeError.
    """
    if table not in legacy_tables(family):
        return b""
    what = f"table {table} of iptables-legacy"
    with instead_of_os_error(what), socket.socket(family, socket.SOCK_DGRAM) as socket_:
        return _info(socket_, family, table)


def legacy_rules(family: int, table: str) -> bytes:
    """Return the table's rules as the kernel has them, without counters, if they take at most 64
    KiB; else, and of a missing table, the same as ``legacy_size``. Raises NodeError.
    """
    size = legacy_size(family, table)
    if not size or int.from_bytes(size[-4:], sys.byteorder) > _MOST_READ:
        return size
    with instead_of_os_error(f"table {table} of iptables-legacy"):
        read = bytearray(read_table(family, table))
    length_at, counters_at = _OFFSETS[family]
    at = _SIZED.size
    while at + counters_at < len(read):
        read[at + counters_at : at + counters_at + _COUNTERS_SIZE] = bytes(_COUNTERS_SIZE)
        (length,) = struct.unpack_from("=H", read, at + length_at)
        at += length
    return bytes(read)


def _info(opened: socket.socket, family: int, table: str) -> bytes:
    """Return struct ipt_getinfo. Raises OSError."""
    name = _TABLE_NAME.pack(table.encode())
    return _getsockopt(opened, _LEVELS[family], _INFO, name, _INFO_LENGTH)


def _getsockopt(opened: socket.socket, level: int, option: int, value: bytes, length: int) -> bytes:
    """getsockopt(2) with a value to send, and for more than socket.getsockopt's 1,024 bytes."""
    buffer = ctypes.create_string_buffer(value, length)
    size = ctypes.byref(ctypes.c_uint32(length))
    if _libc.getsockopt(opened.fileno(), level, option, buffer, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return buffer.raw


LEGACY, NFT = "legacy", "nft"
_LOCK_TIMEOUT = "10"  # seconds to wait for the lock of the iptables tools
FAMILY_OF_TOOL = {"iptables": AF_INET, "ip6tables": AF_INET6}
NFT_FAMILY = {"iptables": "ip", "ip6tables": "ip6"}


@dataclass(frozen=True)
class Tool:
    """One family in one variant."""

    family: str  # iptables or ip6tables
    variant: str  # legacy or nft

    @cached_property
    def command(self) -> str | None:
        """The program; None if it is not installed. Rarely needed: most tables do not exist.

        Raises NodeError.
        """
        return _command(self.family, self.variant)

    @property
    def name(self) -> str:
        return f"{self.family}-{self.variant}"

    def tables(self) -> list[IptablesTable]:
        """Return all tables. Reading loads no module and creates no table. Raises NodeError."""
        return parse_rules(run([f"{self.command}-save"]))

    def table(self, name: str) -> IptablesTable | None:
        """Return one table, or None if it does not exist. Raises NodeError.

        Reading creates no table.
        """
        if not self.has(name):
            return None
        if not self.command:
            raise NodeError(f"{self.name}: it has rules, and {self.name} is not installed here")
        return next(iter(parse_rules(run([f"{self.command}-save", "-t", name]))), None)

    def has(self, table: str) -> bool:
        """Whether the kernel has this table. Raises NodeError."""
        if self.variant == LEGACY:
            return table in legacy_tables(FAMILY_OF_TOOL[self.family])
        return nft.Name(NFT_FAMILY[self.family], table) in nft.tables()

    def restore(self, script: str) -> None:
        """Apply all of the script or nothing. Raises NodeError with the tool's message."""
        run([f"{self.command}-restore", "-w", _LOCK_TIMEOUT, "--noflush"], script)


def tools() -> Iterator[Tool]:
    """Yield both families in both variants."""
    for family in FAMILY_OF_TOOL:
        for variant in (LEGACY, NFT):
            yield Tool(family, variant)


def _command(family: str, variant: str) -> str | None:
    named = f"{family}-{variant}"
    if shutil.which(f"{named}-save") and shutil.which(f"{named}-restore"):
        return named
    return family if shutil.which(f"{family}-save") and _variant(family) == variant else None


def _variant(command: str) -> str:
    """Return the variant, which iptables(8) prints since 1.8: "(nf_tables)" or "(legacy)"."""
    return NFT if "(nf_tables)" in run([command, "-V"]) else LEGACY


def run(command: list[str], stdin: str = "") -> str:
    """Return the output of a tool. Raises NodeError with the tool's message."""
    with instead_of_os_error(command[0]):
        done = child.run(command, stdin)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise NodeError(f"{command[0]}: {reason}")
    return done.stdout


# Read the firewall rules of this thread's network namespace.
#
# iptables-save prints the rules of iptables, `nft -j` (libnftables-json(5)) all others, because nft
# does not show the matches of iptables-nft's rules. Reading loads no module and changes nothing.
# The columns of a concatenation are read as separate conditions, without their combination.


PRIORITIES = {"raw": -300, "mangle": -150, "nat": NAT_DST, "filter": 0, "security": 50}
_SETS = ("set", "map")
_SET_NAME = re.compile(r"'@(.+?)'")
_BUILT_IN = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_L4_PROTOCOLS = ("tcp", "udp", "sctp", "dccp", "udplite", "icmp", "icmpv6")
_LONGEST_RULE, _LONGEST_COMMENT = 160, 60  # characters shown
OTHER_FORM = (AttributeError, LookupError, RecursionError, TypeError, ValueError)  # of output


RAW, FORWARD = "raw", "filter"  # tables of iptables


def tables(unread: list[str], only: str = "") -> Iterator[Table]:
    """Yield all tables except ebpflb's, and kube-proxy's in its mode by nftables.

    ``only``: RAW for those with rules that packets pass before conntrack, FORWARD for those with
    rules that forwarded packets pass at iptables' table filter. Adds a line to ``unread`` for each
    tool of iptables, and each table of nft, whose rules exist and cannot be read.
    """
    names = [only] if only else list(PRIORITIES)
    of_iptables = set[nft.Name]()
    for tool in tools():
        try:
            found = [table for name in names if (table := tool.table(name))]
            yield from [read_iptables(table, tool.name) for table in found]
        except NodeError as error:
            unread.append(str(error))
        except OTHER_FORM:
            unread.append(f"{tool.name}: its output cannot be read")
        else:
            if tool.variant == NFT:
                family = NFT_FAMILY[tool.family]
                of_iptables |= {nft.Name(family, table.name) for table in found}
    try:
        for name in sorted(_tables_of_nft(of_iptables, only)):
            try:
                yield read_nft(run(["nft", "-j", "list", "table", *name]))
            except NodeError as error:
                unread.append(f"{name}: {error}")
                if isinstance(error.__cause__, OSError):  # no answer in time: no other would come
                    return
            except OTHER_FORM:
                unread.append(f"{name}: nft's output cannot be read")
    except NodeError as error:
        unread.append(str(error))


def _tables_of_nft(of_iptables: set[nft.Name], only: str) -> set[nft.Name]:
    """Return what nft is to read. The names are the kernel's: nft 1.0.6 frees what it prints of a
    table with one flag, as the agent's own may be.

    Raises NodeError.
    """
    found = nft.tables_in_force() - of_iptables
    if only:
        found &= nft.raw_tables() if only == RAW else nft.forward_tables()
    found = {name for name in found if is_foreign(name.table)}
    if found and not shutil.which("nft"):
        raise NodeError("nft: it has rules, and nft is not installed here")
    return found


def is_foreign(table: str) -> bool:
    """Whether a table of nftables is neither ebpflb's nor kube-proxy's."""
    return table != NFT_TABLE and not table.startswith("ebpflb")


def read_iptables(found: IptablesTable, tool: str) -> Table:
    """``tool`` is iptables or ip6tables with its variant, such as "iptables-nft"."""
    family = NFT_FAMILY[tool.partition("-")[0]]
    table = Table(f"{tool}, table {found.name}", family=family, name=found.name)
    for name in found.chains:
        hook = name.lower() if name in _BUILT_IN else ""
        table.chains[name] = Chain(
            name, hook, PRIORITIES[found.name], found.name == "nat", found.policies[name]
        )
    for rule in found.rules:
        shown = rule.text if len(rule.text) <= _LONGEST_RULE else f"{rule.text[:_LONGEST_RULE]}..."
        options = tuple(map(_without_set, read_options(rule.text)))
        table.chains[rule.chain].rules.append(Rule(shown, options))
    return table


def _without_set(option: Option) -> Option:
    """Return an unreadable option for an ipset of destinations, which is not read."""
    directions = option.value.rpartition(" ")[2].split(",")
    return NOT_READ if option.name == "--match-set" and "dst" in directions else option


def read_nft(listed: str) -> Table:
    """Read the output of nft for one table. Raises an error of OTHER_FORM."""
    objects = [item for each in json.loads(listed)["nftables"] for item in each.items()]
    (found,) = (value for kind, value in objects if kind == "table")
    family, name = found["family"], found["name"]
    table = Table(f"table {family} {name}", family=family, name=name)
    sets = {value["name"]: value.get("elem", []) for kind, value in objects if kind in _SETS}
    for kind, value in objects:
        if kind == "chain":
            table.chains[value["name"]] = _nft_chain(value)
    reader = _NftReader(sets)
    for kind, value in objects:
        if kind == "rule":
            table.chains[value["chain"]].rules += reader.rules(value)
    return table


def _nft_chain(value: dict[str, Any]) -> Chain:
    hook = value.get("hook", "") if value["family"] != "bridge" else ""
    policy = str(value.get("policy", "")).upper()
    return Chain(value["name"], hook, int(value.get("prio", 0)), value.get("type") == "nat", policy)


class _NftReader:
    """Read rules of one table, which may refer to its named sets and maps."""

    def __init__(self, sets: dict[str, list[Any]]) -> None:
        self._sets = sets

    def rules(self, rule: dict[str, Any]) -> list[Rule]:
        """Return the rule, or one for each element of its verdict map, if that is not empty."""
        comment = f' "{str(rule["comment"])[:_LONGEST_COMMENT]}"' if "comment" in rule else ""
        text = f"handle {rule['handle']}{comment}"
        try:
            plain = [statement for statement in rule["expr"] if "vmap" not in statement]
            alternatives = list(self._by_verdict(rule["expr"])) or [plain]
            sets = frozenset(_SET_NAME.findall(str(rule["expr"])))
            return [Rule(text, self._with_states(each), sets) for each in alternatives]
        except OTHER_FORM:
            return [Rule(text, (UNREAD_RULE,))]

    def _by_verdict(self, statements: list[Any]) -> Iterator[list[Any]]:
        for at, statement in enumerate(statements):
            if "vmap" in statement:
                body = statement["vmap"]
                for value, verdict in self._elements(body["data"]):
                    match = {"match": {"op": "==", "left": body["key"], "right": value}}
                    yield [*statements[:at], match, verdict, *statements[at + 1 :]]
                return
        yield statements

    def _with_states(self, statements: list[Any]) -> tuple[Option, ...]:
        """Return the options; a use of conntrack's state that is not read may be for any state."""
        found = tuple(self._options(statements))
        is_read = any(name == "state" and STATES & {*value.split(",")} for name, value, _ in found)
        uses = "'ct': {'key': 'state'}" in str(statements)
        return (*found, _ANY_STATE) if uses and not is_read else found

    def _options(self, statements: list[Any]) -> Iterator[Option]:
        for statement in statements:
            ((kind, body),) = statement.items()
            if kind == "match":
                yield from self._conditions(**body)
            elif kind in ("jump", "goto"):
                yield Option("-j" if kind == "jump" else "-g", body["target"])
            elif kind in ("accept", "drop", "reject"):
                yield Option("-j", kind.upper())
            elif kind == "mangle" and "payload" in body["key"]:
                yield Option("set header")
            elif kind == "xt":
                yield UNREAD_RULE
            elif kind != "counter" or statement is statements[-1]:
                yield Option(kind)

    def _conditions(self, op: str, left: Any, right: Any) -> Iterator[Option]:
        for column, part in enumerate(left.get("concat", [left])):
            name = _field(part)
            if op in ("<", "<="):
                yield Option(name, f"0-{right}")
            elif op in (">", ">="):
                yield Option(name, f"{right}-65535")
            else:
                yield Option(name, ",".join(self._values(right, column)), op in ("!=", "!"))
            if (protocol := part.get("payload", {}).get("protocol")) in _L4_PROTOCOLS:
                yield Option("protocol", protocol)

    def _elements(self, value: Any) -> Any:
        """Return the elements of a set of the rule, or of a named one."""
        return value["set"] if isinstance(value, dict) else self._sets[value.removeprefix("@")]

    def _values(self, value: Any, column: int) -> Iterator[str]:
        match value:
            case {"set": inner} | {"elem": {"val": inner}}:
                yield from self._values(inner, column)
            case {"concat": parts}:
                yield from self._values(parts[column], 0)
            case {"prefix": {"addr": address, "len": length}}:
                yield f"{address}/{length}"
            case {"range": [first, last]}:
                yield f"{first}-{last}"
            case list():
                for each in value:
                    yield from self._values(each, column)
            case str() if value.startswith("@"):
                yield from self._values(self._elements(value), column)
            case _:
                yield str(value)


def _field(expression: dict[str, Any]) -> str:
    """Return the name of the field, such as "daddr"; "" for what is not compared."""
    ((kind, value),) = expression.items()
    if kind not in ("payload", "meta", "ct") or value.get("dir") == "reply":
        return ""
    return str(value.get("field") or value.get("key", ""))
