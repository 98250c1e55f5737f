# SPDX-License-Identifier: Apache-2.0
"""Any output of the tools, of any length, is read without an exception."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.kernel.netfilter.each_packet import each_packet
from ebpflb.kernel.netfilter.firewall import OTHER_FORM, read_nft
from ebpflb.tools.firewall import Frontend, Search
from tests.tools.firewall.services import (
    RECORDED,
    WAYS,
    frontend,
    of_iptables,
    search,
    services,
    where,
)

LISTED = json.loads((RECORDED / "nft.json").read_text())["nftables"]
OBJECTS = [it for it in LISTED if '"fw"' in json.dumps(it)]
SAVED = (RECORDED / "iptables-nft.save").read_text()
SERVICES = services()
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("@vips"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def paths(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the paths to every part of a JSON value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    found = [way] if way else []
    if isinstance(value, dict | list):
        for key, part in parts:
            found += paths(part, (*way, key)) if isinstance(part, dict | list) else [(*way, key)]
    return found


PATHS = paths(OBJECTS)


@given(st.sampled_from(PATHS), anything)
def test_changed_json(way: tuple[Any, ...], other: Any) -> None:
    """Any part of nft's output may have any value."""
    objects = json.loads(json.dumps(OBJECTS))
    place = objects
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = other
    with suppress(*OTHER_FORM):
        table = read_nft(json.dumps({"nftables": objects}))
        list(Search(SERVICES, WAYS).named(table))
        list(each_packet(table))


NO_TABLES = ["", "[]", "{", '{"nftables": 1}', '{"nftables": []}', '{"nftables": ' + "[" * 100_000]


@pytest.mark.parametrize("text", NO_TABLES, ids=range(len(NO_TABLES)))
def test_no_table(text: str) -> None:
    """Output that is not a table is an error that the survey expects."""
    with pytest.raises(OTHER_FORM):
        read_nft(text)


@given(st.lists(st.sampled_from(SAVED.split(" ")) | st.text(max_size=8), max_size=40))
def test_changed_text(words: list[str]) -> None:
    """Any words may be in iptables-save's output, in any order."""
    text = f"*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING {' '.join(words)}\nCOMMIT\n"
    with suppress(*OTHER_FORM):
        for table in of_iptables(text):
            list(Search(SERVICES, WAYS).named(table))
            list(each_packet(table))


def texts(listed: str, served: list[Frontend] = SERVICES) -> list[str]:
    """Return the named rules."""
    return [where(line)[1] for line in search([read_nft(listed)], served)]


DROP = {"drop": None}
DADDR = {"payload": {"protocol": "ip", "field": "daddr"}}


def rule(chain: str, handle: int, *statements: dict[str, Any]) -> dict[str, Any]:
    place = {"family": "inet", "table": "t", "chain": chain, "handle": handle}
    return {"rule": {**place, "expr": list(statements)}}


def ruleset(*rules: dict[str, Any], chains: int = 1) -> str:
    base = {"type": "filter", "hook": "prerouting", "prio": -300}
    made: list[dict[str, Any]] = [{"table": {"family": "inet", "name": "t"}}]
    for number in range(chains):
        place = {"family": "inet", "table": "t", "name": f"c{number}"}
        made.append({"chain": place | (base if not number else {})})
    return json.dumps({"nftables": [*made, *rules]})


def is_port(port: int) -> dict[str, Any]:
    left = {"payload": {"protocol": "tcp", "field": "dport"}}
    return {"match": {"op": "==", "left": left, "right": port}}


def test_jumps_in_a_circle() -> None:
    """Chains that jump to each other, which the kernel refuses, are walked once."""
    rules = [rule(f"c{i}", i, {"jump": {"target": f"c{(i + 1) % 3}"}}) for i in range(3)]
    assert texts(ruleset(*rules, rule("c2", 9, is_port(30080), DROP), chains=3)) == ["handle 9"]


def test_chains_that_branch() -> None:
    """Chains that jump to the next one in many ways are walked once too."""
    rules = [
        rule(f"c{i}", 100 * i + number, {"jump": {"target": f"c{i + 1}"}})
        for i in range(14)
        for number in range(1, 20)
    ]
    last = rule("c14", 9999, is_port(30080), DROP)
    assert texts(ruleset(*rules, last, chains=15)) == ["handle 9999"]


def test_many_rules_and_services() -> None:
    """A rule is compared with the Services that have its port or address, not with all."""
    many = [
        frontend("other", f"10.96.{i >> 8}.{i & 255}", 80, (f"10.244.{i >> 8}.{i & 255}", 8080))
        for i in range(10_000)
    ]
    rules = [rule("c0", i, is_port(20_000 + i % 20_000), DROP) for i in range(20_000)]
    found = texts(ruleset(*rules), [*SERVICES, *many])
    assert found == ["handle 10080"]


def test_large_set_is_read_once() -> None:
    """Rules that look up the same named set share the parsed set."""
    elements = [f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}" for i in range(50_000)]
    named = {
        "set": {"family": "inet", "table": "t", "name": "s", "elem": [*elements, "203.0.113.10"]}
    }
    match = {"op": "==", "left": DADDR, "right": "@s"}
    rules = [rule("c0", i, {"match": match}, is_port(80), {"drop": None}) for i in range(4)]
    table = read_nft(ruleset(named, *rules))
    assert [where(line)[1] for line in search([table], SERVICES)] == ["handle 0"]
    assert len({id(each.conditions[0].ranges) for each in table.chains["c0"].rules}) == 1
