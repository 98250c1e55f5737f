# SPDX-License-Identifier: Apache-2.0
"""Read the output of `nft -j list ruleset` (libnftables-json(5)), in the words of iptables-save.

The columns of a concatenation are read as separate conditions, without their combination.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from ebpflb.errors import in_json_words
from ebpflb.model.kube_proxy import Option
from ebpflb.tools.firewall.rules import Chain, Rule, Table

_FAMILIES = {"ip": 4, "ip6": 6}
_UNREADABLE = (  # errors caused by JSON of another form
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_OTHER = "(other)"  # a condition or action that is not compared
_STATEMENTS = {
    **{kind: ("-j", kind.upper()) for kind in ("accept", "drop", "reject", "log")},
    **{kind: (f"--{kind}", "") for kind in ("limit", "quota")},
    "queue": ("-j", "NFQUEUE"),
    "dup": ("-j", "TEE"),
    "xt": ("-d", "rule of iptables"),  # unreadable
}
_NAMES = {
    ("payload", "daddr"): "-d",
    ("payload", "dport"): "--dports",
    ("payload", "protocol"): "-p",
    ("payload", "nexthdr"): "-p",
    ("payload", "flags"): "--tcp-flags",
    ("meta", "l4proto"): "-p",
    ("meta", "mark"): "--mark",
    ("ct", "mark"): "--mark",
    ("ct", "state"): "--ctstate",
    ("ct", "ip daddr"): "--ctorigdst",
    ("ct", "ip6 daddr"): "--ctorigdst",
    ("ct", "proto-dst"): "--ctorigdstport",
}
_LONGEST = 60  # characters shown of a rule's comment

Key = tuple[str, str]  # family and name of a table


class _Listing(msgspec.Struct):
    nftables: list[msgspec.Raw]


def read(listed: str, without: set[Key]) -> list[Table]:
    """Return the tables except those of ``without``. Raises ValueError for invalid JSON."""
    try:
        objects = msgspec.json.decode(listed, type=_Listing).nftables
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(in_json_words(str(error))) from error
    return _Reader(without).read(objects)


class _Reader:
    """Read rules last: they may name sets and chains that are listed after them."""

    def __init__(self, without: set[Key]) -> None:
        self._without = without
        self._tables: dict[Key, Table] = {}
        self._sets: dict[tuple[Key, str], list[Any]] = {}
        self._values: dict[object, str] = {}  # of sets, by column

    def read(self, objects: list[msgspec.Raw]) -> list[Table]:
        rules = []
        for each in objects:
            try:
                kind, value = _unwrapped(each)
                key = value["family"], value["name" if kind == "table" else "table"]
                if kind == "rule":
                    rules.append(each)
                elif key not in self._without:
                    self._add(kind, key, value)
            except _UNREADABLE:
                continue
        for each in rules:
            self._add_rule(_unwrapped(each)[1])
        return list(self._tables.values())

    def _add(self, kind: str, key: Key, value: dict[str, Any]) -> None:
        if kind == "table":
            self._tables[key] = Table(f"table {' '.join(key)}", _FAMILIES.get(key[0], 0))
        elif kind == "chain":
            hook = str(value.get("hook", "")) if key[0] != "bridge" else "bridge"
            chain = Chain(
                str(value["name"]), hook, int(value.get("prio", 0)), value.get("type") == "nat"
            )
            self._tables[key].chains[chain.name] = chain
        elif kind in ("set", "map"):
            self._sets[key, value["name"]] = value.get("elem", [])

    def _add_rule(self, value: dict[str, Any]) -> None:
        """Add a rule; a rule of another form becomes an unreadable rule."""
        try:
            key = value["family"], value["table"]
            chain = self._tables[key].chains[value["chain"]]
            comment = f' "{str(value["comment"])[:_LONGEST]}"' if "comment" in value else ""
            text = f"handle {value['handle']}{comment}"
        except _UNREADABLE:
            return
        try:
            chain.rules += [Rule(text, asked) for asked in self._options(key, value["expr"])]
        except _UNREADABLE:
            chain.rules.append(Rule(text, (Option("-d", "cannot be read"),)))

    def _options(self, key: Key, statements: list[Any]) -> list[tuple[Option, ...]]:
        """Return the options of one rule, or of one rule for each verdict of a verdict map."""
        found: list[Option] = []
        verdicts: list[list[Option]] = [[]]
        for statement in statements:
            ((kind, body),) = statement.items()
            if kind == "match":
                found += self._match(key, body["left"], body["right"], body["op"])
            elif kind == "vmap":
                verdicts = list(self._mapped(key, body))
            elif kind != "counter":
                found.append(_done(kind, body))
        if statements and "counter" in statements[-1]:
            found.append(Option("--counter"))
        return [(*found, *each) for each in verdicts]

    def _mapped(self, key: Key, body: dict[str, Any]) -> Iterator[list[Option]]:
        data = body["data"]
        pairs = data["set"] if isinstance(data, dict) else self._sets[key, data.removeprefix("@")]
        groups: dict[str, tuple[dict[str, Any], list[Any]]] = {}
        for element, verdict in pairs:
            groups.setdefault(repr(verdict), (verdict, []))[1].append(element)
        for verdict, elements in groups.values():
            ((kind, to),) = verdict.items()
            yield [*self._match(key, body["key"], {"set": elements}, "=="), _done(kind, to)]

    def _match(self, key: Key, left: Any, right: Any, operator: str) -> Iterator[Option]:
        for column, part in enumerate(left.get("concat", [left])):
            name = _name(part)
            if name in ("--mark", _OTHER):
                yield Option(_OTHER)
            elif operator in ("<", "<=", ">", ">="):
                yield Option(name, f"0-{right}" if operator[0] == "<" else f"{right}-65535")
            else:
                values = self._texts(key, right, column if "concat" in left else None)
                yield Option(name, values, operator in ("!=", "!"))
            if name == "--dports" and part["payload"]["protocol"] != "th":
                yield Option("-p", str(part["payload"]["protocol"]))

    def _texts(self, key: Key, right: Any, column: int | None) -> str:
        """Return all values, separated by commas; those of a named set are computed once."""
        if not (isinstance(right, str) and right.startswith("@")):
            return ",".join(_texts(right, column))
        known = key, right, column
        if known not in self._values:
            elements = self._sets[key, right.removeprefix("@")]
            self._values[known] = ",".join(_texts(elements, column))
        return self._values[known]


def _texts(value: Any, column: int | None) -> Iterator[str]:
    match value:
        case {"set": inner}:
            yield from _texts(inner, column)
        case {"elem": {"val": inner}}:
            yield from _texts(inner, column)
        case {"concat": parts}:
            yield from _texts(parts[column], None)
        case {"prefix": {"addr": address, "len": length}}:
            yield f"{address}/{length}"
        case {"range": [first, last]}:
            yield f"{first}-{last}"
        case list():
            for each in value:
                yield from _texts(each, column)
        case _:
            yield str(value)


def _name(expression: dict[str, Any]) -> str:
    """Return the option of iptables with the same meaning."""
    ((kind, value),) = expression.items()
    if kind == "ct" and "dir" in value and value["dir"] != "original":
        return _OTHER
    if kind not in ("payload", "meta", "ct"):
        return _OTHER
    return _NAMES.get((kind, value.get("field") or value.get("key")), _OTHER)


def _done(kind: str, body: Any) -> Option:
    """Return the option for a statement."""
    if kind in ("jump", "goto"):
        return Option("-j", str(body["target"]))
    if kind == "mangle":
        is_mark = body["key"].keys() & {"meta", "ct"}
        return Option("-j", "MARK" if is_mark else "TOS")
    return Option(*_STATEMENTS.get(kind, (_OTHER, "")))


def _unwrapped(each: msgspec.Raw) -> tuple[str, dict[str, Any]]:
    ((kind, value),) = msgspec.json.decode(each, type=dict[str, dict[str, Any]]).items()
    return kind, value
