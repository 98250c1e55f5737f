# SPDX-License-Identifier: Apache-2.0
"""Whatever the tools print, the search ends, within its steps, and raises nothing."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.diagnose.firewall import nft_parser
from ebpflb.diagnose.firewall.rule_search import RuleSearch
from ebpflb.diagnose.firewall.service_traffic import Traffic, TrafficFrontend
from ebpflb.diagnose.firewall.survey import tables
from ebpflb.model.packet_path import Engine
from ebpflb.node.rulesets import Printed
from tests.diagnose.firewall.services import RECORDED, SERVICES, WEB, frontend, node, search

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
    search(nft_parser.parse(json.dumps({"nftables": objects}).encode()), FLOWS)


NO_LISTS = [b"", b"[]", b"{", b'{"nftables": 1}', b"\xff", b'{"nftables": ' + b"[" * 100_000]


@pytest.mark.parametrize("text", NO_LISTS, ids=range(len(NO_LISTS)))
def test_no_list(text: bytes) -> None:
    """What is no list of objects is said, and the other tools' rules are compared."""
    notes: list[str] = []
    found = list(tables([Printed("nft", text), Printed("iptables-nft", SAVED.encode())], notes))
    assert len(found) == 4
    (note,) = notes
    assert note.startswith("nft: its output cannot be read")


@given(st.lists(st.sampled_from(SAVED.split(" ")) | st.text(max_size=8), max_size=40))
def test_changed_text(words: list[str]) -> None:
    """Any words may be in what iptables-save prints, in any order."""
    text = f"*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING {' '.join(words)}\nCOMMIT\n"
    search(list(tables([Printed("iptables-nft", text.encode(errors="replace"))], [])), FLOWS)


def rule(chain: str, handle: int, *statements: dict[str, Any]) -> dict[str, Any]:
    place = {"family": "inet", "table": "t", "chain": chain, "handle": handle}
    return {"rule": {**place, "expr": list(statements)}}


def ruleset(*rules: dict[str, Any], chains: int = 1) -> bytes:
    base = {"type": "filter", "hook": "prerouting", "prio": -300}
    made: list[dict[str, Any]] = [{"table": {"family": "inet", "name": "t"}}]
    for number in range(chains):
        place = {"family": "inet", "table": "t", "name": f"c{number}"}
        made.append({"chain": place | (base if not number else {})})
    return msgspec.json.encode({"nftables": [*made, *rules]})


def is_port(port: int) -> dict[str, Any]:
    left = {"payload": {"protocol": "tcp", "field": "dport"}}
    return {"match": {"op": "==", "left": left, "right": port}}


def test_jumps_in_a_circle() -> None:
    """Chains that jump to each other, which the kernel refuses, are walked once."""
    rules = [rule(f"c{i}", i, {"jump": {"target": f"c{(i + 1) % 3}"}}) for i in range(3)]
    found = search(
        nft_parser.parse(ruleset(*rules, rule("c2", 9, is_port(30080)), chains=3)), FLOWS
    )
    assert [each.rule.where for each in found] == ["handle 9"]


def test_chains_that_branch() -> None:
    """Chains that jump to the next one in many ways end the search, which is said."""
    rules = [
        rule(f"c{i}", 100 * i + port, is_port(port), {"jump": {"target": f"c{i + 1}"}})
        for i in range(14)
        for port in range(1, 20)
    ]
    made = RuleSearch(Traffic(SERVICES, FLOWS), FLOWS, steps=50_000)
    made.add(nft_parser.parse(ruleset(*rules, chains=15)))
    assert not made.complete


def many_services() -> list[TrafficFrontend]:
    return [
        frontend("ClusterIP", f"10.96.{i >> 8}.{i & 255}", 80, (f"10.244.{i >> 8}.{i & 255}", 8080))
        for i in range(10_000)
    ]


def test_steps_grow_with_the_rules_alone() -> None:
    """Rules that name a service each cost a few steps each, however many services there are."""
    rules = [rule("c0", i, is_port(20_000 + i % 20_000), {"drop": None}) for i in range(20_000)]
    made = RuleSearch(Traffic([*SERVICES, *many_services()], FLOWS), FLOWS)
    begin = made.steps
    made.add(nft_parser.parse(ruleset(*rules)))
    assert made.complete
    assert begin - made.steps < 2 * len(rules)
    assert [each.rule.where for each in made.findings] == ["handle 10080"]


def test_large_set_is_read_once() -> None:
    """Rules that look up the same named set share it."""
    elements = [f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}" for i in range(50_000)]
    named = {
        "set": {"family": "inet", "table": "t", "name": "s", "elem": [*elements, "10.96.0.10"]}
    }
    match = {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": "@s"}
    rules = [rule("c0", i, {"match": match}, is_port(80), {"drop": None}) for i in range(2_000)]
    found = search(nft_parser.parse(ruleset(named, *rules)), FLOWS)
    assert len(found) == 2_000
    assert len({id(each.rule.matches[1]) for each in found}) == 1


def test_unreadable_rules_are_counted() -> None:
    """A rule by an ipset that is not known is not compared, and that is said."""
    text = (
        "*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -m set --match-set x dst -j DROP\nCOMMIT\n"
    )
    made = RuleSearch(Traffic([frontend("NodePort", "", 30080, WEB)], FLOWS), FLOWS)
    made.add(tables([Printed("iptables-nft", text.encode())], []))
    assert (made.findings, made.skipped) == ([], 1)
