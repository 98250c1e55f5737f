# SPDX-License-Identifier: Apache-2.0
"""``ebpflb status``: a verdict on this node, and the facts that it rests on."""

import sys
import textwrap
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from ebpflb.cli import common
from ebpflb.cli.output import COLUMNS, output_option, print_as
from ebpflb.cli.watching import show, watch_option
from ebpflb.errors import NodeError
from ebpflb.kernel.attach import cgroup_links, device_programs
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir, mount_of, state_directories, why_hidden
from ebpflb.kernel.maps.sweep import FLOW_MAPS, FlowTable
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model.kube_proxy import RULES_RETURNED
from ebpflb.options import Paths
from ebpflb.serve import agent_lock
from ebpflb.serve import status as agent_status
from ebpflb.serve.metrics_agent import count_connections
from ebpflb.serve.status import AgentStatus
from ebpflb.serve.verdict import Facts, Verdict, VerdictReason, judge, span
from ebpflb.tools import ask, kube_proxy, place
from ebpflb.tools.firewall.forwarding import dropping

# The text of `ebpflb status`: the verdict, then a line for each fact, in 80 columns.

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
        return "nobody, at sockets"
    if not facts.runs:
        return "what an agent left; services are those of its last sync"
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
                yield from wrapped(label, f"{item}: {_state_text(text)}")
            if len(value) > MAX_NAMED_IN_TEXT:
                yield from wrapped(
                    label, f"and {len(value) - MAX_NAMED_IN_TEXT} more: -o json has all"
                )
        elif value not in (None, []):
            yield from wrapped(
                label, " ".join(value) if isinstance(value, list) else _state_text(value)
            )


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
@output_option
def status(state_dir: Path, run_dir: Path, watch: float | None, output: str) -> None:
    """Show how this node stands, and why.

    The first line is OK, DEGRADED (what was programmed serves, but something is wrong or changes
    are not applied) or DOWN (sockets are not served), with the reason. The exit status is 0, 3 or 4
    for these; 1 if nothing can be found out. docs/runbook.md says what to do.
    """
    common.require_capabilities()
    paths = common.paths(state_dir, run_dir)
    found = show(lambda: _found(paths), lambda found: _print(found, output), watch)
    sys.exit(judge(found.facts)[0].exit_status)


def status_data(paths: Paths) -> dict[str, Any]:
    """What `-o json` prints. Raises NodeError, KernelError or OSError."""
    return _data(_found(paths))


class _Found(NamedTuple):
    """What the verdict rests on, what is on the node, and what else an agent has published."""

    facts: Facts
    node: dict[str, Any]
    published: dict[str, Any]


def _found(paths: Paths) -> _Found:
    """Raises NodeError where the state directory cannot be seen."""
    facts = facts_of(paths, StateDir(paths.state))
    _require_seen(facts)
    node = _node(paths, StateDir(paths.state), facts)
    published = _published(facts.published).items()
    return _Found(facts, node, {name: value for name, value in published if name not in node})


def _data(found: _Found) -> dict[str, Any]:
    facts, node, published = found
    verdict, reasons = judge(facts)
    heads = {"verdict": verdict, "reasons": [reason._asdict() for reason in reasons]}
    stale = {"stale": bool(published) and not facts.runs}
    running = {"agent": "runs" if facts.runs else "does not run"}
    return {**heads, **running, **stale, **node, **published}


def facts_of(paths: Paths, state: StateDir) -> Facts:
    """What the verdict on this node rests on."""
    runs, pulse, hangs = agent_lock.is_running(paths), None, False
    if runs:
        try:
            pulse = ask.pulse(paths)
        except ask.Hangs:
            hangs = True
    return Facts(
        paths=paths,
        runs=runs,
        socket_hooks=sorted(cgroup_links.attached(state)),
        published=agent_status.read(paths),
        now=datetime.now(UTC),
        forwarding={str(each): each.now for each in dropping(paths.state)},
        pulse=pulse,
        hangs=hangs,
        conntrack=(conntrack.count(), conntrack.limit()),
        overruled="" if runs else kube_proxy.overruled(paths.state),
    )


def _published(status: AgentStatus | None) -> dict[str, Any]:
    return msgspec.to_builtins(status) if status else {}


def _require_seen(facts: Facts) -> None:
    """A node where nothing is at all is DOWN; an agent that runs holds what it has attached."""
    mount, kind = mount_of(facts.paths.state)
    is_hidden = kind != "bpf" or (not facts.published and state_directories(mount))
    if why_hidden(facts.paths.state) or (is_hidden and not facts.runs):
        place.require_state_directory(facts.paths.state)


def _node(paths: Paths, state: StateDir, facts: Facts) -> dict[str, Any]:
    """What is found on the node itself, agent or no agent."""
    try:
        with common.pinned_maps(paths.state) as maps:
            flows = {name: FlowTable(maps, name).numbers._asdict() for name in FLOW_MAPS}
            elsewhere = place.why_elsewhere(maps)
            tracked = {} if elsewhere else _conntrack(maps)
    except NodeError:
        flows, elsewhere, tracked = {}, "", _conntrack(None)
    seen = {"maps": state.foreign_maps(), "socket_hooks": facts.socket_hooks, "flows": flows}
    if elsewhere:
        return seen | {"network": f"unknown: {elsewhere}"}
    ahead = device_programs.others_programs(state).before
    return seen | {
        "devices": device_programs.attached_devices(state),
        "programs_ahead": {device: ", ".join(others) for device, others in ahead.items()},
        "conntrack": tracked,
        "forwarding": dict(
            it.split(": ", 1) for it, is_now in facts.forwarding.items() if not is_now
        ),
        "kube_proxy": _kube_proxy(paths.state, facts.published if facts.runs else None),
    }


def _print(found: _Found, output: str) -> None:
    if output == "table":
        click.echo("\n".join(_text(*found)))
    else:
        print_as(output, _data(found))


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


def _conntrack(maps: Mapping[str, Map] | None) -> dict[str, int]:
    """Its entries of all kinds, and those that are flows; empty where nothing is tracked."""
    if not conntrack.count():
        return {}
    numbers = {"entries": conntrack.count(), "limit": conntrack.limit()}
    try:
        return {"flows": count_connections(maps).total(), **numbers} if maps else numbers
    except NodeError:
        return numbers


def _kube_proxy(state: Path, published: AgentStatus | None) -> str | None:
    """As it is now; what the running agent has published of one may be a minute old. Only the agent
    knows whether rules were gone before.
    """
    try:
        found = kube_proxy.detect(state)
    except NodeError as error:
        return f"cannot be checked: {error}"
    if published:
        found = found._replace(left=published.left_to_kube_proxy)
    if published and not published.left_to_kube_proxy:
        were_gone = not published.kube_proxy or RULES_RETURNED in published.kube_proxy
        found = found._replace(rules_returned=bool(found.rules) and were_gone)
    return found.message
