# SPDX-License-Identifier: Apache-2.0
"""Reads what `nft -j list ruleset` prints (libnftables-json(5)), object by object.

What cannot be read makes its rule one that cannot be compared, and nothing else.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from ebpflb.diagnose.firewall import nft_each, nft_match
from ebpflb.diagnose.firewall.matches import AnyMatch, Unknown
from ebpflb.diagnose.firewall.rules import Chain, Does, FirewallRule, FirewallTable
from ebpflb.errors import in_json_words

_FAMILIES = {"ip": 4, "ip6": 6, "inet": 0, "netdev": 0, "bridge": 0}
_UNREADABLE = (  # what JSON of another form leads to
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
_VERDICTS = {
    "accept": Does.ACCEPT,
    "return": Does.ACCEPT,
    "drop": Does.DROP,
    "reject": Does.DROP,
    "dnat": Does.NAT,
    "redirect": Does.NAT,
    "tproxy": Does.NAT,
    "notrack": Does.UNTRACK,
}
_ENDING = {"accept", "drop", "reject", "return"}
_SILENT = {"counter", "log"}
_LONGEST = 60  # of a rule's comment that is shown
_STRONGEST = [Does.MARK, Does.NAT, Does.UNTRACK, Does.DROP, Does.ACCEPT, Does.NOTHING]

Key = tuple[str, str]  # family and name of a table


class _Listing(msgspec.Struct):
    nftables: list[msgspec.Raw]


def parse(listed: bytes, *, without: frozenset[Key] = frozenset()) -> list[FirewallTable]:
    """The tables but those of ``without``. Raises ValueError for what is no list of objects."""
    try:
        objects = msgspec.json.decode(listed, type=_Listing).nftables
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(in_json_words(str(error))) from error
    return _Reader(without).read(objects)


class _Reader:
    """Rules are read last: they may name sets and chains that are listed after them."""

    def __init__(self, without: frozenset[Key]) -> None:
        self._without = without
        self._tables: dict[Key, FirewallTable] = {}
        self._sets: dict[tuple[Key, str], list[Any]] = {}
        self._parsed: dict[object, tuple[AnyMatch, ...]] = {}

    def read(self, objects: list[msgspec.Raw]) -> list[FirewallTable]:
        rules = []
        for each in objects:
            try:
                kind, value = _unwrapped(each)
                key = value["family"], value["name" if kind == "table" else "table"]
                if kind == "rule":
                    rules.append(each)
                elif key not in self._without and value["family"] in _FAMILIES:
                    self._add(kind, key, value)
            except _UNREADABLE:
                continue
        for each in rules:
            self._add_rule(each)
        return list(self._tables.values())

    def _add(self, kind: str, key: Key, value: dict[str, Any]) -> None:
        if kind == "table":
            title = f"table {' '.join(key)}"
            self._tables[key] = FirewallTable(
                title, _FAMILIES[key[0]], of_bridges=key[0] == "bridge"
            )
        elif kind == "chain":
            is_nat, priority = value.get("type") == "nat", int(value.get("prio", 0))
            hook, drops = str(value.get("hook", "")), value.get("policy") == "drop"
            chain = Chain(str(value["name"]), hook, priority, is_nat, drops)
            self._tables[key].chains[chain.name] = chain
        elif kind in ("set", "map"):
            self._sets[key, value["name"]] = value.get("elem", [])

    def _add_rule(self, each: msgspec.Raw) -> None:
        try:
            _, value = _unwrapped(each)
            key = value["family"], value["table"]
            chain = self._tables[key].chains[value["chain"]]
            comment = f' "{str(value["comment"])[:_LONGEST]}"' if "comment" in value else ""
            where = f"handle {value['handle']}{comment}"
        except _UNREADABLE:
            return
        try:
            chain.rules += self._rules(key, where, value["expr"])
        except _UNREADABLE as error:
            chain.rules.append(FirewallRule(where, (Unknown(str(error)),), Does.NOTHING))

    def _rules(
        self, key: Key, where: str, statements: list[dict[str, Any]]
    ) -> Iterator[FirewallRule]:
        """One, or one for each verdict of a verdict map."""
        matches: list[AnyMatch] = []
        done, jump, mark = [Does.NOTHING], "", 0
        for statement in statements:
            kind = next(iter(statement))
            value = statement[kind]
            match kind:
                case "match":
                    matches += self._matches(key, value)
                case "vmap":
                    yield from self._mapped(key, where, matches, value)
                case "jump" | "goto":
                    jump = str(value["target"])
                case "mangle" if _set_field(value) in ("meta mark", "ct mark"):
                    done.append(Does.MARK)
                    mark = _bits(value["value"])
                case "xt":
                    matches.append(Unknown("iptables"))
                case _:
                    done.append(_VERDICTS.get(kind, Does.NOTHING))
        if "vmap" not in (next(iter(each)) for each in statements):
            yield FirewallRule(
                where,
                tuple(matches),
                min(done, key=_STRONGEST.index),
                jump,
                mark,
                _ends(statements),
                nft_each.each(statements),
                nft_each.states(statements),
                nft_each.asks_only_states(statements),
            )

    def _matches(self, key: Key, value: dict[str, Any]) -> tuple[AnyMatch, ...]:
        """Those with named sets once for all rules: the sets may be large."""
        right = value["right"]
        if not (isinstance(right, str) and right.startswith("@")):
            return tuple(nft_match.matches(value, self._lookup(key)))
        known = key, repr(value)
        if known not in self._parsed:
            self._parsed[known] = tuple(nft_match.matches(value, self._lookup(key)))
        return self._parsed[known]

    def _mapped(
        self, key: Key, where: str, matches: list[AnyMatch], value: dict[str, Any]
    ) -> Iterator[FirewallRule]:
        data = value["data"]
        pairs = data["set"] if isinstance(data, dict) else self._sets[key, data.removeprefix("@")]
        groups: dict[str, tuple[dict[str, Any], list[Any]]] = {}
        for element, verdict in pairs:
            groups.setdefault(repr(verdict), (verdict, []))[1].append(element)
        for verdict, elements in groups.values():
            values = nft_match.elements(elements)
            keys = nft_match.key(value["key"], values)
            kind = next(iter(verdict))
            jump = str(verdict[kind]["target"]) if kind in ("jump", "goto") else ""
            does = _VERDICTS.get(kind, Does.NOTHING)
            states = nft_each.of_key(value["key"], values)
            asked = (*matches, *keys)
            alone = bool(states) and not matches and kind != "return"
            yield FirewallRule(where, asked, does, jump, states=states, only_states=alone)

    def _lookup(self, key: Key) -> nft_match.Lookup:
        return lambda name: nft_match.elements(self._sets[key, name])


def _ends(statements: list[dict[str, Any]]) -> bool:
    """Whether the last one ends the chain, and what is before it says exactly for which packets."""
    *before, last = ((kind, each[kind]) for each in statements for kind in each)
    return last[0] in _ENDING and all(
        kind in _SILENT or (kind == "match" and nft_match.is_exact(value)) for kind, value in before
    )


def _unwrapped(each: msgspec.Raw) -> tuple[str, dict[str, Any]]:
    ((kind, value),) = msgspec.json.decode(each, type=dict[str, dict[str, Any]]).items()
    return kind, value


def _set_field(value: dict[str, Any]) -> str:
    key = value["key"]
    kind = next(iter(key))
    return f"{kind} {key[kind].get('key', '')}"


def _bits(value: Any) -> int:
    """Of a number, or of "mark or number"."""
    if isinstance(value, dict) and "|" in value:
        value = value["|"][1]
    return value if isinstance(value, int) else 0
