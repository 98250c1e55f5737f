# SPDX-License-Identifier: Apache-2.0
"""A way down bpf/ is short: hook, find flow or select, the decision, the slot."""

import re

import pytest

from tests.docs.calls import calls, functions, ways
from tests.docs.pages import ROOT

LEVELS = 5
SOCKET_HOOKS = ("connect4", "connect6", "sendmsg4", "sendmsg6")
SELECTING_HOOKS = ("ingress", *SOCKET_HOOKS, "explain")
# It reads a slot again, of a backend that a client or flow has already: nothing is selected there.
REMEMBERED = "backend_find"
COMPARED = re.compile(r"[=!]= VERDICT_|VERDICT_\w+ [=!]=|case VERDICT_|switch \(\w*verdict")


def to_the_slot(hook: str) -> list[tuple[str, ...]]:
    """The chains of calls by which a hook comes to the slot of a backend that it selects."""
    return [way for way in ways(hook, "backend_read") if REMEMBERED not in way]


def documented(name: str) -> tuple[str, ...]:
    """The levels that docs/architecture.md names in the row that begins with this hook."""
    page = (ROOT / "docs/architecture.md").read_text()
    [row] = re.findall(rf"^\| `{name}`.*\|$", page, re.M)
    return tuple(re.findall(r"`(\w+)`", row))


def test_only_one_function_reads_slots() -> None:
    """What is measured below is the way to the map's only reader, but for one that compares."""
    readers = {it.name for it in functions() if re.search(r"LOOKUP\w*\([^;]*\bslots\b", it.text)}
    assert readers == {"backend_read", "slot_load"}


@pytest.mark.parametrize("hook", SELECTING_HOOKS)
def test_selection_is_at_most_five_levels_below_its_hook(hook: str) -> None:
    found = to_the_slot(hook)
    assert found
    assert all(len(way) <= LEVELS for way in found), found


@pytest.mark.parametrize("hook", SELECTING_HOOKS)
def test_every_hook_selects_by_the_same_function(hook: str) -> None:
    """Sockets and packets: the last three levels are the same, and there is one way to them."""
    assert [way[-3:] for way in to_the_slot(hook)] == [
        ("select_backend", "select_once", "backend_read")
    ]


def test_egress_is_at_most_five_levels_above_the_services() -> None:
    """It selects nothing: at most it looks up whether a packet is to a frontend."""
    assert not ways("egress", "select_backend")
    found = ways("egress", "service_read")
    assert found
    assert all(len(way) <= LEVELS for way in found), found


@pytest.mark.parametrize("hook", ["ingress", "connect4"])
def test_architecture_names_the_levels(hook: str) -> None:
    assert [documented(hook)] == to_the_slot(hook)


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        ("ingress", {"packet_parse", "ingress_packet", "packet_translate"}),
        ("ingress_packet", {"ingress_known", "select_backend", "ingress_selected"}),
        ("egress", {"packet_parse", "egress_packet", "packet_translate"}),
    ],
)
def test_steps_stand_beside_each_other(hook: str, steps: set[str]) -> None:
    """Parse, find flow, else select, open flow, rewrite: each called by what names them all."""
    assert steps <= calls()[hook]


def test_verdicts_decide_only_the_action() -> None:
    """They are counted and reported; what the next step is, other types tell."""
    assert {it.name for it in functions() if COMPARED.search(it.text)} == {"action_of"}
