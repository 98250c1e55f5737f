# SPDX-License-Identifier: Apache-2.0
"""Read the firewall rules of this thread's network namespace.

iptables-save prints the rules of iptables, `nft -j` (libnftables-json(5)) all others, because nft
does not show the matches of iptables-nft's rules. Reading loads no module and changes nothing.
The columns of a concatenation are read as separate conditions, without their combination.
"""

import json
from collections.abc import Iterator
from typing import Any

from ebpflb import child
from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import iptables, nft
from ebpflb.kernel.netfilter.firewall_rules import NAT_DST, NOT_READ, Chain, Rule, Table
from ebpflb.model.kube_proxy import NFT_TABLE, IptablesTable, Option, read_options

PRIORITIES = {"raw": -300, "mangle": -150, "nat": NAT_DST, "filter": 0, "security": 50}
_SETS = ("set", "map")
_BUILT_IN = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_L4_PROTOCOLS = ("tcp", "udp", "sctp", "dccp", "udplite", "icmp", "icmpv6")
_LONGEST_RULE, _LONGEST_COMMENT = 160, 60  # characters shown
OTHER_FORM = (AttributeError, LookupError, RecursionError, TypeError, ValueError)  # of output


RAW, FORWARD = "raw", "filter"  # tables of iptables


def tables(unread: list[str], only: str = "") -> Iterator[Table]:
    """Yield all tables except ebpflb's, and kube-proxy's in its mode by nftables.

    ``only``: RAW for those with rules that packets pass before conntrack, FORWARD for those with
    rules that forwarded packets pass at iptables' table filter. Adds a line to ``unread`` for each
    tool whose rules exist and cannot be read.
    """
    names = [only] if only else list(PRIORITIES)
    of_iptables = set[nft.Name]()
    for tool in iptables.tools():
        try:
            found = [table for name in names if (table := tool.table(name))]
            yield from [read_iptables(table, tool.name) for table in found]
        except NodeError as error:
            unread.append(str(error))
        except OTHER_FORM:
            unread.append(f"{tool.name}: its output cannot be read")
        else:
            if tool.variant == iptables.NFT:
                family = iptables.NFT_FAMILY[tool.family]
                of_iptables |= {nft.Name(family, table.name) for table in found}
    try:
        yield from _tables_of_nft(of_iptables, only)
    except NodeError as error:
        unread.append(str(error))
    except OTHER_FORM:
        unread.append("nft: its output cannot be read")


def _tables_of_nft(of_iptables: set[nft.Name], only: str) -> Iterator[Table]:
    known = {RAW: nft.raw_tables, FORWARD: nft.forward_tables, "": nft.tables}[only]
    if not child.find("nft"):
        if any(is_foreign(it.table) for it in known() - of_iptables):
            raise NodeError("nft: it has rules, and nft is not installed here")
        return
    for name in sorted(known()) if only else _listed():
        if name not in of_iptables and is_foreign(name.table):
            yield read_nft(_nft("list", "table", *name))


def _listed() -> list[nft.Name]:
    """Return all tables, also those of the families netdev, bridge and arp."""
    listed = json.loads(_nft("list", "tables"))["nftables"]
    return [nft.Name(it["table"]["family"], it["table"]["name"]) for it in listed if "table" in it]


def _nft(*words: str) -> str:
    return iptables.run(["nft", "-j", *words])


def is_foreign(table: str) -> bool:
    """Whether a table of nftables is neither ebpflb's nor kube-proxy's."""
    return table != NFT_TABLE and not table.startswith("ebpflb")


def read_iptables(found: IptablesTable, tool: str) -> Table:
    """``tool`` is iptables or ip6tables with its variant, such as "iptables-nft"."""
    family = iptables.NFT_FAMILY[tool.partition("-")[0]]
    table = Table(f"{tool}, table {found.name}", family=family)
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
    table = Table(f"table {found['family']} {found['name']}", family=found["family"])
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
        """Return the rule, or one for each element of its verdict map."""
        comment = f' "{str(rule["comment"])[:_LONGEST_COMMENT]}"' if "comment" in rule else ""
        text = f"handle {rule['handle']}{comment}"
        try:
            alternatives = list(self._by_verdict(rule["expr"]))
            return [Rule(text, tuple(self._options(each))) for each in alternatives]
        except OTHER_FORM:
            return [Rule(text, (NOT_READ,))]

    def _by_verdict(self, statements: list[Any]) -> Iterator[list[Any]]:
        for at, statement in enumerate(statements):
            if "vmap" in statement:
                body = statement["vmap"]
                for value, verdict in self._elements(body["data"]):
                    match = {"match": {"op": "==", "left": body["key"], "right": value}}
                    yield [*statements[:at], match, verdict, *statements[at + 1 :]]
                return
        yield statements

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
                yield NOT_READ
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
