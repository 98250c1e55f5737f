# SPDX-License-Identifier: Apache-2.0
"""Reads one match of a rule from nft's JSON (libnftables-json(5)).

Raises ValueError, TypeError or LookupError for what is not as described there.
"""

from collections.abc import Callable, Iterator
from typing import Any

from ebpflb.diagnose.firewall.matches import (
    AnyMatch,
    AnyOf,
    Match,
    Ranges,
    Truth,
    Unknown,
    address_range,
    mark_match,
    port_range,
)

Lookup = Callable[[str], list[Any]]  # the elements of a named set or map
_ALL_BITS = 0xFFFFFFFF
PROTOCOL_NUMBERS = {"icmp": 1, "tcp": 6, "udp": 17, "dccp": 33, "ipv6-icmp": 58, "sctp": 132}
_PROTOCOLS = PROTOCOL_NUMBERS | {"icmpv6": 58, "udplite": 136}
_FAMILIES = {"ipv4": 4, "ip": 4, "ipv6": 6, "ip6": 6, 2: 4, 10: 6, 0x800: 4, 0x86DD: 6}
_CT_FIELDS = {
    ("daddr", "original"): "original_address",
    ("proto-dst", "original"): "original_port",
    ("saddr", "reply"): "reply_address",
    ("proto-src", "reply"): "reply_port",
}
_EXACT = {"address", "port", "protocol", "family", *_CT_FIELDS.values()}
_PORT_FIELDS = {"port", "original_port", "reply_port"}


def matches(statement: dict[str, Any], lookup: Lookup) -> Iterator[AnyMatch]:
    """Of the value of "match"; nothing for what ebpflb makes no difference to."""
    left, operator, right = statement["left"], statement["op"], statement["right"]
    negated = operator in ("!=", "!")
    name, of = _field(left)
    yield from of
    if name in ("mark", "dnat"):
        yield from _bits(name, left, operator, right)
    elif "concat" in left:
        yield from key(left, _values(right, lookup), negated)
    elif name and operator in ("<", "<=", ">", ">="):
        yield _limit(name, operator, right)
    elif name:
        yield _one(name, _values(right, lookup), negated)
    elif "&" in left and _field(left["&"][0])[0]:
        yield Unknown(str(left))


def key(expression: dict[str, Any], values: list[Any], negated: bool = False) -> Iterator[AnyMatch]:
    """Of an expression that must be one of the values: of a set, or of a map's keys."""
    if "concat" not in expression:
        name, of = _field(expression)
        yield from of
        if name in ("dnat", "mark"):
            yield Unknown(name)
        elif name:
            yield _one(name, values, negated)
        return
    fields = [_field(each) for each in expression["concat"]]
    yield from (match for _, of in fields for match in of)
    names = [name for name, _ in fields]
    if not any(names):
        return
    if any(name in ("dnat", "mark", "local") for name in names):
        yield Unknown("concatenation")
        return
    choices = {
        tuple(
            Match(name, Ranges([_range(name, part)]))
            for name, part in zip(names, value["concat"], strict=True)
            if name
        )
        for value in values
    }
    yield AnyOf(tuple(choices), negated)


def is_exact(statement: dict[str, Any]) -> bool:
    """Whether ``matches`` gives all that the statement asks, and nothing that may be unknown."""
    left = statement["left"]
    parts = left.get("concat", [left])
    if parts == [{"ct": {"key": "status"}}]:
        return statement["op"] == "in" and bool(_words(statement["right"]) == ["dnat"])
    return all(_field(each)[0] in _EXACT for each in parts)


def elements(values: list[Any]) -> list[Any]:
    """A set's, without their timeouts, counters and comments."""
    return [
        value["elem"]["val"] if isinstance(value, dict) and "elem" in value else value
        for value in values
    ]


def _field(expression: dict[str, Any]) -> tuple[str, list[AnyMatch]]:
    """The field of a View, "" for another, and what asking for it says about the packet."""
    kind = next(iter(expression))
    value = expression[kind]
    match kind:
        case "payload":
            return _payload(value)
        case "meta":
            names = {"l4proto": "protocol", "nfproto": "family", "protocol": "family"}
            return {**names, "mark": "mark"}.get(value["key"], ""), []
        case "ct" if value["key"] == "status":
            return "dnat", []
        case "ct":
            family, _, name = value["key"].rpartition(" ")
            found = _CT_FIELDS.get((name, value.get("dir", "")), "")
            return found, [_family(family)] if family in ("ip", "ip6") else []
        case "fib":
            asks_type = value["result"] == "type" and "daddr" in value["flags"]
            return ("local" if asks_type else ""), []
        case "&":
            name, of = _field(value[0])
            return (name if name in ("mark", "dnat") else ""), of
    return "", []


def _payload(value: dict[str, Any]) -> tuple[str, list[AnyMatch]]:
    protocol, name = value.get("protocol", ""), value.get("field", "")
    if protocol in ("ip", "ip6"):
        names = {"daddr": "address", "protocol": "protocol", "nexthdr": "protocol"}
        return names.get(name, ""), [_family(protocol)]
    of: list[AnyMatch] = []
    if protocol in _PROTOCOLS:
        of = [Match("protocol", Ranges([(_PROTOCOLS[protocol],) * 2]))]
    return ("port" if name == "dport" else ""), of


def _family(word: str) -> Match:
    return Match("family", Ranges([(_FAMILIES[word],) * 2]))


def _values(right: Any, lookup: Lookup) -> list[Any]:
    if isinstance(right, str) and right.startswith("@"):
        return lookup(right[1:])
    if isinstance(right, dict) and "set" in right:
        inner = right["set"]
        return elements(inner) if isinstance(inner, list) else _values(inner, lookup)
    return right if isinstance(right, list) else [right]


def _one(name: str, values: list[Any], negated: bool) -> AnyMatch:
    if name == "local":
        return Truth(name, negated != ("local" not in values))
    return Match(name, Ranges(_range(name, value) for value in values), negated)


def _range(name: str, value: Any) -> tuple[int, int]:
    if isinstance(value, dict) and "range" in value:
        first, last = value["range"]
        return _range(name, first)[0], _range(name, last)[1]
    if name in _PORT_FIELDS:
        return port_range(str(value))
    if name in ("protocol", "family"):
        number = value if name == "protocol" and isinstance(value, int) else None
        known: dict[Any, int] = _PROTOCOLS if name == "protocol" else _FAMILIES
        return (known.get(value, -1) if number is None else number,) * 2
    if isinstance(value, dict):
        return address_range(f"{value['prefix']['addr']}/{value['prefix']['len']}")
    return address_range(str(value))


def _limit(name: str, operator: str, right: Any) -> AnyMatch:
    if name not in _PORT_FIELDS:
        return Unknown(f"{name} {operator}")
    number = int(right)
    first, last = {
        "<": (0, number - 1),
        "<=": (0, number),
        ">": (number + 1, 0xFFFF),
        ">=": (number, 0xFFFF),
    }[operator]
    return Match(name, Ranges([(first, last)] if first <= last else []))


def _bits(name: str, left: Any, operator: str, right: Any) -> Iterator[AnyMatch]:
    """Of a mark or of conntrack's status, alone or under a mask.

    "==" and "!=" compare the whole status, which is never "dnat" alone; "in" and "!" test bits.
    """
    mask = left["&"][1] if "&" in left else None
    if name == "dnat":
        if "dnat" in _words(right if mask is None else mask) and (mask or operator in ("in", "!")):
            is_zero = mask is not None and right == 0
            yield Truth("dnat", (operator in ("!", "!=")) != is_zero)
    elif isinstance(right, int) and (mask is None or isinstance(mask, int)):
        yield mark_match(right, _ALL_BITS if mask is None else mask, negated=operator == "!=")
    else:
        yield Unknown("mark")


def _words(value: Any) -> list[Any]:
    """The flags of "dnat", of a list of them, of a set, or of an expression with |."""
    if isinstance(value, dict):
        (value,) = value.values()
    return value if isinstance(value, list) else [value]
