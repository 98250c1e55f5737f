# SPDX-License-Identifier: Apache-2.0
"""Read the output of `nft -j list ruleset` (libnftables-json(5)), in the words of iptables-save.

The columns of a concatenation are read as separate matches, without their combination.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from ebpflb.errors import in_json_words
from ebpflb.tools.firewall.rules import Chain, Option, Rule, Table

_FAMILIES = {"ip": 4, "ip6": 6}
_UNREADABLE = (  # errors caused by JSON of another form
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_TARGETS = {"queue": "NFQUEUE", "dup": "TEE"} | {
    verdict: verdict.upper()
    for verdict in ("accept", "drop", "reject", "return", "log", "dnat", "redirect", "tproxy")
}
_OTHER = "(other)"  # a condition or action that does not concern destinations
_NAMES = {
    ("payload", "daddr"): "-d",
    ("payload", "dport"): "--dports",
    ("payload", "protocol"): "-p",
    ("payload", "nexthdr"): "-p",
    ("payload", "flags"): "--tcp-flags",
    ("meta", "l4proto"): "-p",
    ("meta", "mark"): "--mark",
    ("ct", "mark"): "--ctmark",
    ("ct", "state"): "--ctstate",
    ("ct", "status"): "--ctstatus",
    ("ct", "ip daddr"): "--ctorigdst",
    ("ct", "ip6 daddr"): "--ctorigdst",
    ("ct", "proto-dst"): "--ctorigdstport",
    ("fib", "type"): "--dst-type",
}
_LONGEST = 60  # characters shown of a rule's comment

Key = tuple[str, str]  # family and name of a table


class _Listing(msgspec.Struct):
    nftables: list[msgspec.Raw]


def read(listed: bytes, without: set[Key]) -> list[Table]:
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
            else:
                found += _done(kind, body)
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
            asked = self._match(key, body["key"], {"set": elements}, "==")
            yield [*asked, *_done(kind, to)]

    def _match(self, key: Key, left: Any, right: Any, operator: str) -> Iterator[Option]:
        negated = operator in ("!=", "!")
        parts = left.get("concat", [left])
        for column, part in enumerate(parts):
            name = _name(part)
            if name == "--mark":
                yield _mark(left, right, negated)
            elif name == "--ctstatus":
                is_zero = right == 0
                asks = "dnat" in f"{left}{right}"
                yield Option("--ctstate", "DNAT", negated != is_zero) if asks else Option(_OTHER)
            elif operator in ("<", "<=", ">", ">="):
                yield Option(name, f"0-{right}" if operator[0] == "<" else f"{right}-65535")
            else:
                values = self._texts(key, right, column if "concat" in left else None)
                yield Option(name, values, negated)
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
    if kind == "&":
        return _name(value[0])
    if kind == "ct" and "dir" in value and value["dir"] != "original":
        return _OTHER
    if kind == "fib" and "daddr" not in value["flags"]:
        return _OTHER
    if kind not in ("payload", "meta", "ct", "fib"):
        return _OTHER
    return _NAMES.get((kind, value.get("field") or value.get("key") or value.get("result")), _OTHER)


def _mark(left: dict[str, Any], right: Any, negated: bool) -> Option:
    mask = left["&"][1] if "&" in left else 0xFFFFFFFF
    known = isinstance(mask, int) and isinstance(right, int)
    return Option("--mark", f"{right}/{mask}", negated) if known else Option(_OTHER)


def _done(kind: str, body: Any) -> Iterator[Option]:
    """Yield the options for a statement."""
    if kind in ("jump", "goto"):
        yield Option("-j", str(body["target"]))
    elif kind in _TARGETS:
        yield Option("-j", _TARGETS[kind])
    elif kind == "mangle" and _name(body["key"]) in ("--mark", "--ctmark"):
        yield from (Option("-j", "MARK"), Option("--set-mark", str(_bits(body["value"]))))
    elif kind == "mangle":
        yield Option("-j", "TOS")
    elif kind in ("limit", "quota"):
        yield Option(f"--{kind}")
    elif kind == "xt":
        yield Option("-d", "rule of iptables")
    elif kind != "counter":
        yield Option(_OTHER)


def _bits(value: Any) -> int:
    """Return a number, or the number in "mark or number".

    The result is 0 for other values, which clear or copy bits.
    """
    if isinstance(value, dict) and "|" in value:
        value = value["|"][1]
    return value if isinstance(value, int) else 0


def _unwrapped(each: msgspec.Raw) -> tuple[str, dict[str, Any]]:
    ((kind, value),) = msgspec.json.decode(each, type=dict[str, dict[str, Any]]).items()
    return kind, value
