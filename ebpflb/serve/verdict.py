# SPDX-License-Identifier: Apache-2.0
"""The verdict about a node, as in `ebpflb status`: OK, DEGRADED or DOWN, and why.

OK: this node is served, by an agent that applies the changes that it receives; no problem is known.
DEGRADED: the content of the maps serves, but there is a problem, or changes are not applied.
DOWN: sockets of this node are not served.

The published status of an agent counts only as long as that agent runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from ebpflb.model.pulse import Pulse
from ebpflb.options import Paths
from ebpflb.serve.conditions import Cause, conditions
from ebpflb.serve.status import AgentStatus

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


def judge(facts: Facts) -> tuple[Verdict, list[VerdictReason]]:
    """Return the verdict, and every reason for it, the gravest first; no reason means OK."""
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
