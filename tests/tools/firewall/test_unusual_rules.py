# SPDX-License-Identifier: Apache-2.0
"""Whatever the tools print, and however much, it is read and nothing is raised."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.kernel.netfilter.rulesets import Printed
from ebpflb.model.packet_path import Engine
from ebpflb.tools.firewall import read_nft
from ebpflb.tools.firewall.named import Frontend, Frontends, Search
from ebpflb.tools.firewall.survey import each_packet, tables
from tests.tools.firewall.services import RECORDED, SERVICES, frontend, node, search

OBJECTS = json.loads((RECORDED / "nft.json").read_text())["nftables"]
SAVED = (RECORDED / "iptables-nft.save").read_text()
FLOWS = node(Engine.FLOWS)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("@vips"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def paths(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """To every part of a JSON value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    found = [way] if way else []
    if isinstance(value, dict | list):
        for key, part in parts:
            found += paths(part, (*way, key)) if isinstance(part, dict | list) else [(*way, key)]
    return found


PATHS = paths(OBJECTS)


@given(st.sampled_from(PATHS), anything)
def test_changed_json(way: tuple[Any, ...], other: Any) -> None:
    """Any part of what nft prints may be anything else."""
    objects = json.loads(json.dumps(OBJECTS))
    place = objects
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = other
    for table in read_nft.read(json.dumps({"nftables": objects}), set()):
        list(Search(Frontends(SERVICES), FLOWS).named(table))
        list(each_packet(table))


NO_LISTS = ["", "[]", "{", '{"nftables": 1}', '{"nftables": ' + "[" * 100_000]


@pytest.mark.parametrize("text", NO_LISTS, ids=range(len(NO_LISTS)))
def test_no_list(text: str) -> None:
    """What is no list of objects is said, and the other tools' rules are compared."""
    notes: list[str] = []
    found = list(tables([Printed("nft", text), Printed("iptables-nft", SAVED)], notes))
    assert len(found) == 4
    (note,) = notes
    assert note.startswith("nft: its output cannot be read")


@given(st.lists(st.sampled_from(SAVED.split(" ")) | st.text(max_size=8), max_size=40))
def test_changed_text(words: list[str]) -> None:
    """Any words may be in what iptables-save prints, in any order."""
    text = f"*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING {' '.join(words)}\nCOMMIT\n"
    for table in tables([Printed("iptables-nft", text)], []):
        list(Search(Frontends(SERVICES), FLOWS).named(table))
        list(each_packet(table))


def texts(listed: str, services: list[Frontend] = SERVICES) -> list[str]:
    """The rules that are named."""
    found = search(read_nft.read(listed, set()), FLOWS, services=services)
    return [each.rule for each in found]


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
    assert texts(ruleset(*rules, rule("c2", 9, is_port(30080)), chains=3)) == ["handle 9"]


def test_chains_that_branch() -> None:
    """Chains that jump to the next one in many ways are walked once too."""
    rules = [
        rule(f"c{i}", 100 * i + port, is_port(port), {"jump": {"target": f"c{i + 1}"}})
        for i in range(14)
        for port in range(1, 20)
    ]
    last = rule("c14", 9999, is_port(30080))
    assert texts(ruleset(*rules, last, chains=15)) == ["handle 9999"]


def test_many_rules_and_services() -> None:
    """A rule is compared with the Services that have its port or address, not with all."""
    services = [
        frontend("ClusterIP", f"10.96.{i >> 8}.{i & 255}", 80, (f"10.244.{i >> 8}.{i & 255}", 8080))
        for i in range(10_000)
    ]
    rules = [rule("c0", i, is_port(20_000 + i % 20_000), {"drop": None}) for i in range(20_000)]
    found = texts(ruleset(*rules), services=[*SERVICES, *services])
    assert found == ["handle 10080"]


def test_large_set_is_read_once() -> None:
    """Rules that look up the same named set share it."""
    elements = [f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}" for i in range(50_000)]
    named = {
        "set": {"family": "inet", "table": "t", "name": "s", "elem": [*elements, "10.96.0.10"]}
    }
    match = {"op": "==", "left": DADDR, "right": "@s"}
    rules = [rule("c0", i, {"match": match}, is_port(80), {"drop": None}) for i in range(2_000)]
    (table,) = read_nft.read(ruleset(named, *rules), set())
    assert len(search([table], FLOWS)) == 2_000
    assert len({id(each.conditions[0].ranges) for each in table.chains["c0"].rules}) == 1
