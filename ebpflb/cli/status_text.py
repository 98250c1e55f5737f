# SPDX-License-Identifier: Apache-2.0
"""The text of `ebpflb status`: the verdict, then a line for each fact, in 80 columns."""

import textwrap
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

from ebpflb.cli.output import COLUMNS
from ebpflb.serve.verdict import Facts, Verdict, VerdictReason, span

MAX_NAMED_IN_TEXT = 10  # of one field; the other formats have all
_LABEL = 18  # columns of the longest label

SERVED = "this node is served"


def headline(verdict: Verdict, reasons: list[VerdictReason], left: str = "") -> Iterator[str]:
    """The verdict in words: a line for each reason, the gravest first; what is ``left`` to
    kube-proxy.
    """
    if not reasons:
        besides = f", except what is left to kube-proxy: {left}" if left else ""
        yield from wrapped(f"{verdict}: ", f"{SERVED}{besides}")
    for reason in reasons:
        yield from wrapped(f"{reason.verdict}: ", reason.text)


def agent(facts: Facts) -> str:
    """Whether an agent runs, which one, and since when."""
    published = facts.published
    if not published:
        return "runs" if facts.runs else "does not run"
    if facts.runs:
        return f"runs, pid {published.pid}, since {since(published.started, facts.now)}"
    return f"does not run; pid {published.pid} did, from {since(published.started, facts.now)}"


def served_by(facts: Facts) -> str:
    """Whose programs serve, and with which services."""
    if not facts.socket_hooks:
        return "nobody, at sockets"
    if not facts.runs:
        return "what an agent left; services are those of its last sync"
    return "the agent, with the services that it has received"


def resets(facts: Facts) -> dict[str, str]:
    """Service port -> after how long its connections are reset, alike in both families."""
    watched = facts.published.reset_on_removal if facts.published else ()
    return {str(each.name): f"after {each.grace:g} s" for each in watched}


def since(time: str, now: datetime) -> str:
    """``time`` is of RFC 3339."""
    return f"{time} ({span(now - datetime.fromisoformat(time))} ago)"


def rows(report: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A line for each value; none for what is empty. A mapping has a line for each item."""
    for name, value in report.items():
        label = f"{indent}{name.replace('_', ' '):{_LABEL}} "
        if isinstance(value, Mapping):
            for item, text in islice(value.items(), MAX_NAMED_IN_TEXT):
                yield from wrapped(label, f"{item}: {_text(text)}")
            if len(value) > MAX_NAMED_IN_TEXT:
                yield from wrapped(
                    label, f"and {len(value) - MAX_NAMED_IN_TEXT} more: -o json has all"
                )
        elif value not in (None, []):
            yield from wrapped(label, " ".join(value) if isinstance(value, list) else _text(value))


def wrapped(label: str, text: str) -> list[str]:
    """A word longer than a line, as a path may be, is not broken: it could not be copied."""
    return textwrap.wrap(
        " ".join(text.split()),
        COLUMNS,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{word} {number}" for word, number in value.items())
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
