# SPDX-License-Identifier: Apache-2.0
"""``ebpflb status``: a verdict on this node, and the facts that it rests on."""

import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import click

from ebpflb.cli import common
from ebpflb.cli.output import Output, data_option, print_as, show, watch_option
from ebpflb.serve.verdict import Facts, Verdict, VerdictReason, judge, span
from ebpflb.tools import pins
from ebpflb.tools.node_status import NodeStatus, read_status

# The text of `ebpflb status`: the verdict, then a line for each fact.

MAX_NAMED_IN_TEXT = 10  # of one field; the other formats have all
_LABEL = 18  # columns of the longest label

SERVED = "this node is served"


def headline(verdict: Verdict, reasons: list[VerdictReason], left: str = "") -> Iterator[str]:
    """The verdict in words: a line for each reason, the gravest first; what is ``left`` to
    kube-proxy.
    """
    if not reasons:
        besides = f", except what is left to kube-proxy: {left}" if left else ""
        yield f"{verdict}: {SERVED}{besides}"
    for reason in reasons:
        yield f"{reason.verdict}: {reason.text}"


def agent_text(facts: Facts) -> str:
    """Whether an agent runs, which one, and since when."""
    published = facts.published
    if not published:
        return "runs" if facts.runs else "does not run"
    if facts.runs:
        return f"runs, pid {published.pid}, since {status_since(published.started, facts.now)}"
    return (
        f"does not run; pid {published.pid} did, from {status_since(published.started, facts.now)}"
    )


def served_by(facts: Facts) -> str:
    """Whose programs serve, and with which services."""
    if not facts.socket_hooks:
        return "no program is attached to sockets"
    if not facts.runs:
        return "left by an agent; services are those of its last sync"
    return "the agent, with the services that it has received"


def resets_text(facts: Facts) -> dict[str, str]:
    """Service port -> after how long its connections are reset, alike in both families."""
    watched = facts.published.reset_on_removal if facts.published else ()
    return {str(each.name): f"after {each.grace:g} s" for each in watched}


def status_since(time: str, now: datetime) -> str:
    """``time`` is of RFC 3339."""
    return f"{time} ({span(now - datetime.fromisoformat(time))} ago)"


def status_rows(report: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A line for each value; none for what is empty. A mapping has a line for each item."""
    for name, value in report.items():
        label = f"{indent}{name.replace('_', ' '):{_LABEL}} "
        if isinstance(value, Mapping):
            for item, text in islice(value.items(), MAX_NAMED_IN_TEXT):
                yield f"{label}{item}: {_state_text(text)}"
            if len(value) > MAX_NAMED_IN_TEXT:
                yield f"{label}and {len(value) - MAX_NAMED_IN_TEXT} more: -o json has all"
        elif value not in (None, []):
            yield label + (" ".join(value) if isinstance(value, list) else _state_text(value))


def _state_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{word} {number}" for word, number in value.items())
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


# Published, but part of other lines of the text, or none.
_IN_WORDS = frozenset({"pid", "started", "origin", "kube_proxy_runs"})


@click.command()
@common.state_dir
@common.run_dir
@watch_option
@data_option
def status(state_dir: Path, run_dir: Path, watch: float | None, output: Output) -> None:
    """Show how this node stands, and why.

    The first line is OK, DEGRADED (what was programmed serves, but something is wrong or changes
    are not applied) or DOWN (sockets are not served), with the reason. The exit status is 0, 3 or 4
    for these; 1 if nothing can be found out. docs/runbook.md says what to do.
    """
    common.require_capabilities()
    paths = pins.paths(state_dir, run_dir)
    found = show(lambda: read_status(paths), lambda found: _print(found, output), watch)
    sys.exit(judge(found.facts)[0].exit_status)


def _print(found: NodeStatus, output: Output) -> None:
    if not output.is_data:
        click.echo("\n".join(_text(*found)))
    else:
        print_as(output, found.as_data())


def _text(facts: Facts, node: dict[str, Any], published: dict[str, Any]) -> list[str]:
    """What a dead agent has left is apart from what is true now."""
    heads = {"agent": agent_text(facts), "served_by": served_by(facts)}
    left = facts.published.left_to_kube_proxy if facts.published and facts.runs else ""
    lines = [*headline(*judge(facts), left), *status_rows(heads | node)]
    shown = {name: value for name, value in published.items() if name not in _IN_WORDS}
    received = shown.get("last_received", {})
    shown["last_received"] = {k: status_since(at, facts.now) for k, at in received.items()}
    shown["reset_on_removal"] = resets_text(facts)
    if facts.runs:
        lines += status_rows(shown)
    elif published:
        lines += ["stale, as the last agent left it:", *status_rows(shown, indent="  ")]
    return lines
