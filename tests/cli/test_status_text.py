# SPDX-License-Identifier: Apache-2.0
"""The lines of `ebpflb status`."""

from typing import Any

from msgspec import structs

from ebpflb.cli import status
from ebpflb.serve.conditions import Cause, Verdict, VerdictReason
from ebpflb.serve.status import initial
from ebpflb.version import VERSION


def test_the_reason_is_whole() -> None:
    """Each reason has a whole line, whatever its length, with its heading in the runbook."""
    text = "map services: " + "no space is left " * 9
    reason = VerdictReason(Verdict.DEGRADED, Cause.SYNC_ERROR, text)
    assert list(status.headline(Verdict.DEGRADED, [reason])) == [f"DEGRADED (sync error): {text}"]


def test_the_versions() -> None:
    """The command's version is shown, and the agent's if it differs."""
    published = initial(node="node", source="api")
    own = f"ebpflb {VERSION}"
    for version, text in ((VERSION, own), ("", own), ("9.9", f"{own}, the agent 9.9")):
        assert status.versions(structs.replace(published, version=version)) == text
    assert status.versions(None) == own


def test_a_field_names_no_more_than_ten() -> None:
    """A thousand Services that do not fit do not hide the other lines."""
    full = {f"a/{i}": "full" for i in range(1000)}
    lines = list(status.fact_lines("not_programmed", full))
    assert len(lines) == status.MAX_NAMED_IN_TEXT + 1
    assert "and 990 more: -o json has all" in lines[-1]


def test_what_is_empty_has_no_line() -> None:
    """An empty field has no line, and a group without lines has no title. Zero is a value."""
    facts: dict[str, Any] = {
        "source_errors": {},
        "programs": None,
        "lists_complete": False,
        "service_ports": 0,
    }
    assert list(status.groups(facts)) == ["", "services", f"  {'service ports':20} 0"]


def test_booleans_are_words() -> None:
    """Booleans are words, and numbers have names."""
    facts = {"lists_complete": True, "flows": {"tcp": {"entries": 3}}}
    assert list(status.groups(facts)) == [
        "",
        "agent",
        "  lists complete       yes",
        "",
        "connections",
        "  flows                tcp: entries 3",
    ]


def test_no_word_needs_a_glossary() -> None:
    """No field has a name that only this program uses."""
    shown = {name for names in status.GROUPS.values() for name in names.split()}
    unusual = ("stale", "swept", "contested", "ahead", "kept")
    assert not [name for name in shown if any(word in name for word in unusual)]
