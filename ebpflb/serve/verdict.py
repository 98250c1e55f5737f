# SPDX-License-Identifier: Apache-2.0
"""How a node stands, as `ebpflb status` says it: OK, DEGRADED or DOWN, and why.

OK: this node is served, by an agent that applies what it receives, and nothing is wrong.
DEGRADED: what was programmed serves, but something is wrong, or changes are not applied.
DOWN: sockets of this node are not served.

What an agent has published counts only as long as that agent runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from ebpflb.model.pulse import Pulse
from ebpflb.options import Paths
from ebpflb.serve.status import CURRENT_PROGRAMS, AgentStatus

# Two bookmarks of the API server that did not come (a minute each, with their jitter), and the
# period in which an agent publishes when it last received something.
OLD_AFTER = timedelta(minutes=4)
CONNTRACK_FULL = 0.99  # of the limit: a full table frees single half-open entries


class Verdict(StrEnum):
    """From good to bad."""

    OK = "OK"
    DEGRADED = "DEGRADED"
    DOWN = "DOWN"

    @property
    def exit_status(self) -> int:
        """Of `ebpflb status`; 1 and 2 are those of a command that fails, or is used wrongly."""
        return {Verdict.OK: 0, Verdict.DEGRADED: 3, Verdict.DOWN: 4}[self]


class Cause(StrEnum):
    """What can be wrong; each has its heading in docs/runbook.md."""

    NOTHING_HERE = "nothing is here"
    NO_SOCKET_HOOKS = "no socket hooks"
    NO_AGENT = "no agent runs"
    NO_ANSWER = "agent does not answer"
    STALLED = "loop stalled"
    LATE = "changes late"
    PROGRAMS = "programs of an earlier version"
    LISTS = "lists not complete"
    NODE_UNKNOWN = "node unknown"
    SOURCE_ERRORS = "source errors"
    OLD_NEWS = "nothing received"
    SYNC_ERROR = "sync error"
    NOT_PROGRAMMED = "not programmed"
    DEVICES_NOT_SERVED = "devices not served"
    INVALID_OBJECTS = "invalid objects"
    DRIFT = "drift"
    AUDIT_ERRORS = "audit errors"
    STALE_UDP = "stale UDP sockets"
    PORTS_NOT_OPEN = "ports not open"
    KUBE_PROXY_MISSING = "kube-proxy missing"
    NOT_FORWARDED = "not forwarded"
    CONNTRACK_FULL = "conntrack full"


class VerdictReason(NamedTuple):
    """``text`` says it in words, with what it means for this node."""

    verdict: Verdict
    cause: Cause
    text: str


@dataclass(frozen=True)
class Facts:
    """What a verdict rests on. ``published``: of the last agent; None if there was none.

    ``forwarding``: what FORWARD drops in words, and whether it does so now.
    ``pulse``: what the agent answers now; None where it cannot be asked. ``hangs``: it does not
    answer.
    """

    paths: Paths
    runs: bool
    socket_hooks: Sequence[str]
    published: AgentStatus | None
    now: datetime
    forwarding: Mapping[str, bool] = field(default_factory=dict)
    pulse: Pulse | None = None
    hangs: bool = False
    overruled: str = ""  # what is wrong if programs without an agent come before a kube-proxy
    conntrack: tuple[int, int] = (0, 0)  # entries, and how many there may be; 0 is no limit


def judge(facts: Facts) -> tuple[Verdict, list[VerdictReason]]:
    """The verdict, and every reason for it, the gravest first; no reason means OK."""
    reasons = sorted(_reasons(facts), key=lambda reason: -list(Verdict).index(reason.verdict))
    return reasons[0].verdict if reasons else Verdict.OK, reasons


def _reasons(facts: Facts) -> Iterator[VerdictReason]:
    yield from _hooks(facts)
    for text, is_now in facts.forwarding.items():
        if is_now:
            yield _degraded(Cause.NOT_FORWARDED, text)
    yield from _conntrack(facts)
    if not facts.runs:
        yield from _no_agent(facts)
        return
    yield from _pulse(facts)
    if facts.published:
        for rule in _RULES:
            yield from rule(facts.published)
        yield from _old_news(facts.published, facts.now)


def _hooks(facts: Facts) -> Iterator[VerdictReason]:
    if facts.socket_hooks:
        return
    where = f"no programs in {facts.paths.state}"
    if facts.runs and facts.published and facts.published.attached:
        text = f"{where}: the agent that runs holds them, and they serve only until it ends"
        yield _degraded(Cause.NO_SOCKET_HOOKS, text)
    elif facts.runs:
        text = f"{where}: sockets are not served until the agent has attached them"
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
        text = "no agent runs: changes of services are not applied"
    elif facts.socket_hooks:
        text = f"no agent runs, nor is there a status of one in {facts.paths.run}: see --run-dir"
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


def _programs(status: AgentStatus) -> Iterator[VerdictReason]:
    if status.programs != CURRENT_PROGRAMS:
        yield _degraded(Cause.PROGRAMS, status.programs)


def _lists(status: AgentStatus) -> Iterator[VerdictReason]:
    if not status.lists_complete:
        text = "not all of Services, EndpointSlices and the Node have been received yet"
        yield _degraded(Cause.LISTS, f"{text}: nothing is written before")


def _node(status: AgentStatus) -> Iterator[VerdictReason]:
    if status.node_unknown:
        text = f"{status.node_unknown}: /healthz answers 503; see --hostname-override"
        yield _degraded(Cause.NODE_UNKNOWN, text)


def _kube_proxy(status: AgentStatus) -> Iterator[VerdictReason]:
    """Where it is to run, the status says only what is wrong with it."""
    if status.left_to_kube_proxy and status.kube_proxy:
        yield _degraded(Cause.KUBE_PROXY_MISSING, f"kube-proxy {status.kube_proxy}")


def _ports(status: AgentStatus) -> Iterator[VerdictReason]:
    """A kube-proxy has them as long as it runs: then the status names them all the same."""
    if not status.kube_proxy_runs:
        yield from _ports_not_open(status)


def _sync(status: AgentStatus) -> Iterator[VerdictReason]:
    if status.sync_error:
        yield _degraded(Cause.SYNC_ERROR, f"the last sync failed: {status.sync_error}")


def _stale_udp(status: AgentStatus) -> Iterator[VerdictReason]:
    if status.stale_udp_error:
        text = "UDP sockets and flows may stay with endpoints that have gone"
        yield _degraded(Cause.STALE_UDP, f"{text}: {status.stale_udp_error}")


def _counted(
    cause: Cause, field: str, one: str, many: str
) -> Callable[[AgentStatus], Iterator[VerdictReason]]:
    """A rule for what is named in a field of the status, with the first name and its reason."""

    def rule(status: AgentStatus) -> Iterator[VerdictReason]:
        named: Mapping[str, str] = getattr(status, field)
        for name in list(named)[:1]:
            what = one if len(named) == 1 else f"{len(named)} {many}, the first"
            yield _degraded(cause, f"{what}: {name}: {named[name]}")

    return rule


_ports_not_open = _counted(
    Cause.PORTS_NOT_OPEN,
    "ports_not_open",
    "a port of the agent is not open",
    "ports of the agent are not open",
)


def _old_news(status: AgentStatus, now: datetime) -> Iterator[VerdictReason]:
    ages = {kind: now - datetime.fromisoformat(at) for kind, at in status.last_received.items()}
    old = [f"{kind} for {span(age)}" for kind, age in ages.items() if age > OLD_AFTER]
    if old:
        yield _degraded(Cause.OLD_NEWS, f"nothing received of {', '.join(old)}")


def _degraded(cause: Cause, text: str) -> VerdictReason:
    return VerdictReason(Verdict.DEGRADED, cause, text)


_RULES: tuple[Callable[[AgentStatus], Iterator[VerdictReason]], ...] = (
    _sync,
    _counted(Cause.DRIFT, "drift", "not as planned", "things are not as planned"),
    _counted(Cause.AUDIT_ERRORS, "audit_errors", "the audit fails", "audits fail"),
    _programs,
    _lists,
    _node,
    _counted(
        Cause.SOURCE_ERRORS, "source_errors", "a source cannot be read", "sources cannot be read"
    ),
    _counted(
        Cause.NOT_PROGRAMMED,
        "not_programmed",
        "a Service does not fit",
        "Services do not fit",
    ),
    _counted(
        Cause.DEVICES_NOT_SERVED,
        "devices_not_served",
        "a device is not served",
        "devices are not served",
    ),
    _stale_udp,
    _kube_proxy,
    _ports,
    _counted(Cause.INVALID_OBJECTS, "invalid_objects", "an object is invalid", "invalid objects"),
)


def span(time: timedelta) -> str:
    """In the largest unit of which there are two, as "95 s" or "3 h"; "0 s" if it is negative."""
    seconds = max(0, int(time.total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
