# SPDX-License-Identifier: Apache-2.0
"""``ebpflb status``: version, verdict and reasons, then the facts that the verdict rests on."""

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import click

from ebpflb.cli import common
from ebpflb.cli.output import Output, data_option, print_as
from ebpflb.options import Paths
from ebpflb.serve.conditions import Facts, Verdict, VerdictReason, judge, since
from ebpflb.serve.status import AgentStatus
from ebpflb.tools.node_status import read_status
from ebpflb.version import VERSION

# The fields in the text, by group and in order. Other fields of the data are in other lines.
GROUPS = {
    "agent": "agent node node_unknown source standalone last_received source_errors "
    "lists_complete programs monitor failing_parts ports_not_open removed_settings",
    "traffic": "served_by network maps socket_hooks socket_translation devices devices_not_served "
    "choices_lost devices_to_come flows_wait other_programs_first packet_path flowtable "
    "conntrack_liberal forwarding",
    "services": "service_ports backends in_sync sync_error node_not_written not_programmed "
    "addresses address_conflicts not_announced addresses_missing hand_over hand_over_blocked "
    "not_handed_to not_handed_at set_aside claimed_twice "
    "invalid_objects object_warnings drift audit_errors objects_differ",
    "connections": "flows conntrack udp_not_ended ports_not_reserved",
    "kube-proxy": "kube_proxy left_to_kube_proxy",
}
MAX_NAMED_IN_TEXT = 10  # of one field; the other formats have all
_LABEL = 20  # columns of the longest label

SERVED = "this node is served"


def headline(verdict: Verdict, reasons: list[VerdictReason], left: str = "") -> Iterator[str]:
    """Return the verdict in words: a line for each reason, the most serious first.

    Each line names its heading in docs/runbook.md. A last line names what is ``left`` to
    kube-proxy.
    """
    if not reasons:
        besides = f", except what is left to kube-proxy: {left}" if left else ""
        yield f"{verdict}: {SERVED}{besides}"
    for reason in reasons:
        yield f"{reason.verdict} ({reason.cause}): {reason.text}"


def versions(published: AgentStatus | None) -> str:
    """Return the command's version, and the agent's if it differs."""
    if not published or published.version in ("", VERSION):
        return f"ebpflb {VERSION}"
    return f"ebpflb {VERSION}, the agent {published.version}"


def agent_text(facts: Facts) -> str:
    """Return whether an agent runs, which one, and since when."""
    published = facts.published
    if not published:
        return "runs" if facts.runs else "does not run"
    if facts.runs:
        return f"runs, pid {published.pid}, since {since(published.started, facts.now)}"
    return f"does not run; pid {published.pid} did, from {since(published.started, facts.now)}"


def served_by(facts: Facts) -> str:
    """Return which programs serve, and with which services."""
    if not facts.socket_hooks:
        return "no program is attached to sockets"
    if not facts.runs:
        left = "programs that an agent left, with the services of its last sync"
        return f"{left}; {facts.table}" if facts.table else left
    return "the agent, with the services that it has received"


def groups(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of each group that has a value, under its name."""
    for title, names in GROUPS.items():
        given = [name for name in names.split() if name in facts]
        lines = [line for name in given for line in fact_lines(name, facts[name])]
        if lines:
            yield from ("", title, *lines)


def fact_lines(name: str, value: Any) -> Iterator[str]:
    """Yield a line for each item of a mapping, or one line for any other value; no line if it is
    empty.
    """
    label = f"  {name.replace('_', ' '):{_LABEL}} "
    if isinstance(value, Mapping):
        for item, text in islice(value.items(), MAX_NAMED_IN_TEXT):
            yield f"{label}{item}: {_state_text(text)}"
        if len(value) > MAX_NAMED_IN_TEXT:
            yield f"{label}and {len(value) - MAX_NAMED_IN_TEXT} more: -o json has all"
    elif value is not False and value not in (None, [], ""):
        yield label + (" ".join(value) if isinstance(value, list) else _state_text(value))


def _state_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{word} {number}" for word, number in value.items())
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


@click.command()
@common.agents_paths
@data_option
def status(paths: Paths, output: Output) -> None:
    """Show the state of this node, and why.

    After the version comes OK, DEGRADED (Services are served, but something is wrong or
    changes are not applied) or DOWN (sockets are not served), with each reason. The exit status is
    0, 3 or 4 for these; 1 if the status is unknown. The page runbook.md says what to do; `ebpflb
    --help` says where it is.

    \b
    $ ebpflb status
    $ ebpflb status -o yaml
    $ ebpflb status -o json
    """
    found = read_status(paths)
    if output.is_data:
        print_as(output, found.as_data())
    else:
        click.echo("\n".join(_text(*found)))
    sys.exit(judge(found.facts)[0].exit_status)


def _text(facts: Facts, node: dict[str, Any], published: dict[str, Any]) -> list[str]:
    """Return the status as text. If the agent has ended, its last status is printed separately."""
    left = facts.published.left_to_kube_proxy if facts.published and facts.runs else ""
    received = published.get("last_received", {})
    published = {
        **published,
        "last_received": {kind: since(at, facts.now) for kind, at in received.items()},
        "devices_to_come": published.get("devices_to_come") or "",
    }
    now = {"agent": agent_text(facts), "served_by": served_by(facts), **node}
    lines = [versions(facts.published), *headline(*judge(facts), left)]
    if facts.runs:
        return [*lines, *groups({**now, **published})]
    before = list(groups(published))
    ended = ["", "before the agent ended:", *before] if facts.published else []
    return [*lines, *groups(now), *ended]
