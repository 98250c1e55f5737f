# SPDX-License-Identifier: Apache-2.0
"""All problems of the agent in one list: status, /readyz and metrics are views of it.

Each condition follows from the agent's status alone. The verdict about a node, as in `ebpflb
status`, adds problems that only a command sees (no agent, no hooks, a full conntrack).
docs/runbook.md has a heading for each cause.

OK: this node is served, by an agent that applies the changes that it receives; no problem is known.
DEGRADED: the content of the maps serves, but there is a problem, or changes are not applied.
DOWN: sockets of this node are not served.

The published status of an agent counts only as long as that agent runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from ebpflb.model.nodes import Pulse
from ebpflb.options import Paths
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
    OBJECTS_DIFFER = "objects differ"
    UDP_NOT_ENDED = "UDP sockets not ended"
    NOT_REBALANCED = "connections not rebalanced"
    NODE_NOT_WRITTEN = "node readiness not written"
    ADDRESS_CONFLICTS = "address conflicts"
    NOT_ANNOUNCED = "addresses not announced"
    ADDRESSES_MISSING = "addresses missing"
    HAND_OVER_BLOCKED = "hand-over blocked"
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


# A part of the plan is not in force while one of these lasts.
_UNREADY = {
    *(Cause.DRIFT, Cause.AUDIT_ERRORS, Cause.PROGRAMS),
    *(Cause.DEVICES_NOT_SERVED, Cause.CHOICES_LOST),
}


# Each cause's words for a reason ({}), or for reasons by name ("one | many"). What is wrong is in
# the field of the status that has the cause's name: a reason, reasons by name, or True.
_LASTING = {
    Cause.DRIFT: "not as planned | differences from the plan",
    Cause.AUDIT_ERRORS: "an audit cannot finish | audits cannot finish",
    Cause.PROGRAMS: "the programs are {}",
    Cause.FAILING_PARTS: "a part of the agent fails | parts of the agent fail",
    Cause.LISTS: "not all of Services, EndpointSlices and the Node have been received yet: nothing "
    "is written before then",
    Cause.NODE_UNKNOWN: "{}: /healthz answers 503; see --hostname-override",
    Cause.SOURCE_ERRORS: "a source cannot be read | sources cannot be read",
    Cause.OBJECTS_DIFFER: "an object differs from the cluster's | objects differ, as doctor found",
    Cause.NOT_PROGRAMMED: "a Service does not fit | Services do not fit",
    Cause.CLAIMED_TWICE: "an address is claimed twice | addresses are claimed twice",
    Cause.DEVICES_NOT_SERVED: "a device is not served | devices are not served",
    Cause.CHOICES_LOST: "a device's requests are not translated | devices' requests are not "
    "translated",
    Cause.UDP_NOT_ENDED: "UDP sockets and flows may keep removed endpoints: {}",
    Cause.NOT_REBALANCED: "idle connections do not move to new endpoints, as Services want: {}",
    Cause.NODE_NOT_WRITTEN: "the Node does not say in the API whether Services work here: {}",
    Cause.ADDRESS_CONFLICTS: "another station has a load balancer address | other stations have "
    "load balancer addresses",
    Cause.NOT_ANNOUNCED: "load balancer addresses are not announced as they should be: {}",
    Cause.ADDRESSES_MISSING: "a load balancer address is missing | load balancer addresses are "
    "missing",
    Cause.HAND_OVER_BLOCKED: "clients' addresses are not kept, as a hand-over is blocked | "
    "hand-overs are blocked, so clients' addresses are not kept",
    Cause.KUBE_PROXY_MISSING: "kube-proxy {}",
    Cause.PORTS_NOT_OPEN: "a port of the agent is not open | ports of the agent are not open",
    Cause.REMOVED_SETTINGS: "a setting has no effect | settings have no effect",
    Cause.INVALID_OBJECTS: "an object is invalid | invalid objects",
}


_OTHER_FIELDS: Mapping[Cause, Callable[[AgentStatus], object]] = {
    Cause.PROGRAMS: lambda it: it.programs != CURRENT_PROGRAMS and it.programs,
    Cause.LISTS: lambda it: not it.lists_complete,
    Cause.CLAIMED_TWICE: lambda it: it.standalone and it.claimed_twice,  # else a tenant could
    Cause.KUBE_PROXY_MISSING: lambda it: it.left_to_kube_proxy and it.kube_proxy,
    Cause.PORTS_NOT_OPEN: lambda it: not it.kube_proxy_runs and it.ports_not_open,  # it has them
}


def conditions(status: AgentStatus) -> list[Condition]:
    """Return all problems, the most serious first."""
    return [*_beginning(status), *_lasting(status)]


def _beginning(status: AgentStatus) -> Iterator[Condition]:
    """Yield what is usual after a start or a change; and a sync that fails."""
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


def _lasting(status: AgentStatus) -> Iterator[Condition]:
    """Yield a condition for each reason; for several reasons by name one, which names the first."""
    for cause, text in _LASTING.items():
        read = _OTHER_FIELDS.get(cause, attrgetter(cause.name.lower()))
        found, unready = read(status), cause in _UNREADY
        if isinstance(found, Mapping) and found:
            one, _, many = text.partition(" | ")
            name, reason = next(iter(found.items()))
            what = one if len(found) == 1 else f"{len(found)} {many}, the first"
            yield Condition(cause, f"{what}: {name}: {reason}", unready)
        elif found:
            yield Condition(cause, text.format(found), unready)


def not_ready(status: AgentStatus) -> list[str]:
    """Return why not everything is in force, for /readyz; empty if everything is."""
    return [each.text for each in conditions(status) if each.unready]


# Two missing bookmarks of the API server (a minute each, with their jitter), and the period in
# which an agent publishes when it last received something.
OLD_AFTER = timedelta(minutes=4)
CONNTRACK_FULL = 0.99  # of the limit: a full table frees single half-open entries


class Verdict(StrEnum):
    """From good to bad."""

    OK = "OK"
    DEGRADED = "DEGRADED"
    DOWN = "DOWN"

    @property
    def exit_status(self) -> int:
        """The exit status of `ebpflb status`.

        1 and 2 mean that a command fails, or is used wrongly.
        """
        return {Verdict.OK: 0, Verdict.DEGRADED: 3, Verdict.DOWN: 4}[self]


class VerdictReason(NamedTuple):
    """``text`` is the problem in words, with its meaning for this node."""

    verdict: Verdict
    cause: Cause
    text: str


class Facts(Struct, frozen=True):
    """The facts behind a verdict. ``published``: of the last agent; None if there was none.

    ``forwarding``: the traffic that FORWARD drops, in words, and whether it does so now. ``pulse``:
    the agent's current answer; None if it cannot be asked. ``hangs``: it does not answer.
    """

    paths: Paths
    runs: bool
    socket_hooks: Sequence[str]
    published: AgentStatus | None
    now: datetime
    forwarding: Mapping[str, bool] = {}
    pulse: Pulse | None = None
    hangs: bool = False
    overruled: str = ""  # the problem if a kube-proxy runs behind programs that no agent updates
    conntrack: tuple[int, int] = (0, 0)  # entries, and their limit; 0 is no limit
    table: str = ""  # the problem if the programs need an nft table that is missing, in words
    faults: Sequence[
        str
    ] = ()  # links, programs and pins that are missing; a running agent has them


def judge(facts: Facts) -> tuple[Verdict, list[VerdictReason]]:
    """Return the verdict, and every reason for it, the most serious first; no reason means OK."""
    reasons = sorted(_reasons(facts), key=lambda reason: -list(Verdict).index(reason.verdict))
    return reasons[0].verdict if reasons else Verdict.OK, reasons


def _reasons(facts: Facts) -> Iterator[VerdictReason]:
    yield from _hooks(facts)
    for text, is_now in facts.forwarding.items():
        if is_now:
            yield _degraded(Cause.NOT_FORWARDED, text)
    yield from _conntrack(facts)
    if facts.table:
        yield _degraded(Cause.NO_TABLE, facts.table)
    if facts.faults:
        yield _degraded(Cause.DRIFT, f"{'; '.join(facts.faults)}: start the agent")
    if not facts.runs:
        yield from _no_agent(facts)
        return
    yield from _pulse(facts)
    if facts.published:
        for each in conditions(facts.published):
            if not each.passing:
                yield _degraded(each.cause, each.text)
        yield from _old_news(facts.published, facts.now)


def _hooks(facts: Facts) -> Iterator[VerdictReason]:
    if facts.socket_hooks:
        return
    where = f"no programs in {facts.paths.state}"
    if facts.runs and facts.published and facts.published.attached:
        text = f"{where}: the running agent holds them; they serve only until it stops"
        yield _degraded(Cause.NO_SOCKET_HOOKS, text)
    elif facts.runs:
        text = f"{where}: sockets are not served until the agent has attached the programs"
        yield VerdictReason(Verdict.DOWN, Cause.NO_SOCKET_HOOKS, text)
    elif facts.published:
        yield VerdictReason(Verdict.DOWN, Cause.NO_SOCKET_HOOKS, f"{where}: sockets are not served")
    else:
        text = f"{where}, and no agent's status in {facts.paths.run}: see --state-dir, --run-dir"
        yield VerdictReason(Verdict.DOWN, Cause.NOTHING_HERE, text)


def _conntrack(facts: Facts) -> Iterator[VerdictReason]:
    entries, limit = facts.conntrack
    if limit and entries >= CONNTRACK_FULL * limit:
        text = f"the kernel's conntrack is full ({entries} of {limit} entries)"
        lost = "new connections of this node are dropped, to services or not"
        yield _degraded(Cause.CONNTRACK_FULL, f"{text}: {lost}; raise nf_conntrack_max")


def _no_agent(facts: Facts) -> Iterator[VerdictReason]:
    if facts.published:
        text = "no agent is running: changes of Services are not applied"
    elif facts.socket_hooks:
        text = (
            f"no agent is running, and there is no status of one in {facts.paths.run}: see "
            "--run-dir"
        )
    else:
        return
    beside = f"; {facts.overruled}" if facts.overruled else ""
    yield VerdictReason(Verdict.DEGRADED, Cause.NO_AGENT, f"{text}{beside}")


def _pulse(facts: Facts) -> Iterator[VerdictReason]:
    unapplied = "changes of services are not applied"
    if facts.hangs:
        who = f" (pid {facts.published.pid})" if facts.published else ""
        text = f"the agent{who} does not answer: {unapplied}"
        yield _degraded(Cause.NO_ANSWER, text)
    if facts.pulse:
        yield from (_degraded(Cause.STALLED, f"{it}: {unapplied}") for it in facts.pulse.stalled)
        yield from (_degraded(Cause.LATE, it) for it in facts.pulse.late)


def _old_news(status: AgentStatus, now: datetime) -> Iterator[VerdictReason]:
    ages = {kind: now - datetime.fromisoformat(at) for kind, at in status.last_received.items()}
    old = [f"{kind} for {span(age)}" for kind, age in ages.items() if age > OLD_AFTER]
    if old:
        yield _degraded(Cause.OLD_NEWS, f"nothing received of {', '.join(old)}")


def _degraded(cause: Cause, text: str) -> VerdictReason:
    return VerdictReason(Verdict.DEGRADED, cause, text)


def since(time: str, now: datetime) -> str:
    """A time, with its age; ``time`` is of RFC 3339."""
    at = datetime.fromisoformat(time)
    return f"{at.astimezone().isoformat()} ({span(now - at)} ago)"


def span(time: timedelta) -> str:
    """Format in the largest unit with at least two, such as "95 s" or "3 h"; "0 s" if negative."""
    seconds = max(0, int(time.total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
