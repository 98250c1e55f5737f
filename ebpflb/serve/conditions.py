# SPDX-License-Identifier: Apache-2.0
"""All problems of the agent in one list: status, /readyz and metrics are views of it.

Each condition follows from the agent's status alone. ``verdict`` adds problems that only a command
sees (no agent, no hooks, a full conntrack). docs/runbook.md has a heading for each cause.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from ebpflb.serve.status import CURRENT_PROGRAMS, AgentStatus


class Cause(StrEnum):
    """The possible problems."""

    NOTHING_HERE = "nothing is here"
    NO_SOCKET_HOOKS = "no socket hooks"
    NO_AGENT = "no agent runs"
    NO_TABLE = "no nft table"
    NO_ANSWER = "agent does not answer"
    STALLED = "loop stalled"
    LATE = "changes late"
    FAILING_PARTS = "parts of the agent failing"
    PROGRAMS = "programs of an earlier version"
    LISTS = "lists not complete"
    NODE_UNKNOWN = "node unknown"
    SOURCE_ERRORS = "source errors"
    OLD_NEWS = "nothing received"
    SYNC_ERROR = "sync error"
    NOT_PROGRAMMED = "not programmed"
    CLAIMED_TWICE = "claimed twice"
    DEVICES_NOT_SERVED = "devices not served"
    CHOICES_LOST = "choices lost"
    INVALID_OBJECTS = "invalid objects"
    DRIFT = "drift"
    AUDIT_ERRORS = "audit errors"
    STALE_UDP = "UDP sockets not ended"
    NODE_NOT_WRITTEN = "node readiness not written"
    PORTS_NOT_OPEN = "ports not open"
    KUBE_PROXY_MISSING = "kube-proxy missing"
    REMOVED_SETTINGS = "removed settings"
    NOT_FORWARDED = "not forwarded"
    CONNTRACK_FULL = "conntrack full"


class Condition(NamedTuple):
    """A current problem, in words.

    ``unready``: a part of the plan is not in force, so /readyz answers 503. A Service that does not
    fit is not such a condition: otherwise one tenant could take every node out of service.
    ``passing``: usual for a moment after a start or a change; `ebpflb status` leaves it out.
    """

    cause: Cause
    text: str
    unready: bool = False
    passing: bool = False


def conditions(status: AgentStatus) -> list[Condition]:
    """Return all problems, the gravest first."""
    return [
        *_not_in_force(status),
        *_not_received(status),
        *_not_served(status),
    ]


def not_ready(status: AgentStatus) -> list[str]:
    """Return why not everything is in force, for /readyz; empty if everything is."""
    return [each.text for each in conditions(status) if each.unready]


def _not_in_force(status: AgentStatus) -> Iterator[Condition]:
    if not status.attached:
        text = "the programs are not attached"
        yield Condition(Cause.NO_SOCKET_HOOKS, text, unready=True, passing=True)
    if status.flows_wait:
        text = f"packets open no flows until {status.devices_to_come} more devices have programs"
        yield Condition(Cause.DEVICES_NOT_SERVED, text, unready=True, passing=True)
    if status.sync_error:
        text = f"the last sync failed: {status.sync_error}"
        yield Condition(Cause.SYNC_ERROR, text, unready=not status.in_sync)
    elif not status.in_sync:
        text = "not everything is written yet"
        yield Condition(Cause.SYNC_ERROR, text, unready=True, passing=True)
    yield from _named(
        Cause.DRIFT, status.drift, "not as planned", "differences from the plan", True
    )
    yield from _named(
        Cause.AUDIT_ERRORS,
        status.audit_errors,
        "an audit cannot finish",
        "audits cannot finish",
        unready=True,
    )
    if status.programs != CURRENT_PROGRAMS:
        yield Condition(Cause.PROGRAMS, f"the programs are {status.programs}", unready=True)


def _not_received(status: AgentStatus) -> Iterator[Condition]:
    yield from _named(
        Cause.FAILING_PARTS,
        status.failing_parts,
        "a part of the agent fails",
        "parts of the agent fail",
    )
    if not status.lists_complete:
        text = "not all of Services, EndpointSlices and the Node have been received yet"
        yield Condition(Cause.LISTS, f"{text}: nothing is written before then")
    if status.node_unknown:
        text = f"{status.node_unknown}: /healthz answers 503; see --hostname-override"
        yield Condition(Cause.NODE_UNKNOWN, text)
    yield from _named(
        Cause.SOURCE_ERRORS,
        status.source_errors,
        "a source cannot be read",
        "sources cannot be read",
    )


def _not_served(status: AgentStatus) -> Iterator[Condition]:
    yield from _named(
        Cause.NOT_PROGRAMMED,
        status.not_programmed,
        "a Service does not fit",
        "Services do not fit",
    )
    if status.standalone:  # elsewhere a tenant could degrade every node
        yield from _named(
            Cause.CLAIMED_TWICE,
            status.contested,
            "an address is claimed twice",
            "addresses are claimed twice",
        )
    yield from _named(
        Cause.DEVICES_NOT_SERVED,
        status.devices_not_served,
        "a device is not served",
        "devices are not served",
        unready=True,
    )
    yield from _named(
        Cause.CHOICES_LOST,
        status.choices_lost,
        "a device's requests are not translated",
        "devices' requests are not translated",
        unready=True,
    )
    yield from _not_done(status)


def _not_done(status: AgentStatus) -> Iterator[Condition]:
    if status.stale_udp_error:
        text = "UDP sockets and flows may keep removed endpoints"
        yield Condition(Cause.STALE_UDP, f"{text}: {status.stale_udp_error}")
    if status.node_readiness_error:
        text = "the Node does not say in the API whether Services work here"
        yield Condition(Cause.NODE_NOT_WRITTEN, f"{text}: {status.node_readiness_error}")
    if status.left_to_kube_proxy and status.kube_proxy:
        yield Condition(Cause.KUBE_PROXY_MISSING, f"kube-proxy {status.kube_proxy}")
    if not status.kube_proxy_runs:  # a running kube-proxy has these ports
        yield from _named(
            Cause.PORTS_NOT_OPEN,
            status.ports_not_open,
            "a port of the agent is not open",
            "ports of the agent are not open",
        )
    yield from _named(
        Cause.REMOVED_SETTINGS,
        status.removed_settings,
        "a setting has no effect",
        "settings have no effect",
    )
    yield from _named(
        Cause.INVALID_OBJECTS, status.invalid_objects, "an object is invalid", "invalid objects"
    )


def _named(
    cause: Cause, reasons: Mapping[str, str], one: str, many: str, unready: bool = False
) -> Iterator[Condition]:
    """Yield one condition for all of these; it names the first one, with its reason."""
    for name in list(reasons)[:1]:
        what = one if len(reasons) == 1 else f"{len(reasons)} {many}, the first"
        yield Condition(cause, f"{what}: {name}: {reasons[name]}", unready)
