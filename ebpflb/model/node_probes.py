# SPDX-License-Identifier: Apache-2.0
"""Probes that wait for their answers, and what the last ones told (node_health.py)."""

import random
from collections import deque

from msgspec import Struct

from ebpflb.model.node_members import Member

ATTEMPTS, ATTEMPT_SECONDS = 5, 0.15
MISS_SECONDS = 0.8  # after the first attempt
SAMPLE_SECONDS = 2.0


class Probe(Struct, eq=False):
    """Some attempts with one token; ``attempts`` are left. Each is an echo request, with a SYN as
    long as the node has never answered an echo request.

    ``is_scheduled``: no one asked for it, so it may stand for all nodes.
    """

    member: Member
    token: int
    begun: float
    attempts: int
    sent: int = 0
    is_scheduled: bool = False
    askers: list[tuple[str, int]] = []  # msgspec copies it


class NodeProbes:
    """At most one probe of each node. ``echoes`` and ``syns`` are to be sent."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._probes: dict[str, Probe] = {}
        self.echoes: list[tuple[str, int]] = []
        self.syns: list[tuple[str, int]] = []

    def begin(
        self,
        member: Member,
        now: float,
        *,
        is_scheduled: bool = False,
        attempts: int = ATTEMPTS,
        asker: tuple[str, int] | None = None,
    ) -> bool:
        """Probe a node; return False if one is on the way, which then serves this purpose too."""
        probe = self._probes.get(member.text)
        is_new = probe is None
        if probe is None:
            probe = Probe(member, self._rng.getrandbits(64), now, attempts)
            self._probes[member.text] = probe
            self._send(probe)
        probe.attempts = max(probe.attempts, attempts)
        probe.is_scheduled |= is_scheduled
        if asker:
            probe.askers.append(asker)
        return is_new

    def answered(self, text: str, token: int) -> Probe | None:
        """Return, and end, the probe that an answer belongs to."""
        probe = self._probes.get(text)
        if probe is None or probe.token != token:
            return None
        return self._probes.pop(text)

    def missed(self, now: float) -> list[Probe]:
        """End, and return, the probes that have no answer in time; repeat the others."""
        late = [each for each in self._probes.values() if now - each.begun >= MISS_SECONDS]
        for each in late:
            del self._probes[each.member.text]
        for each in self._probes.values():
            if each.sent < each.attempts and now - each.begun >= ATTEMPT_SECONDS * each.sent:
                self._send(each)
        return late

    def restart(self, now: float) -> None:
        """Begin all probes again."""
        for each in self._probes.values():
            each.begun, each.sent = now, 0
            self._send(each)

    def end(self, member: Member) -> None:
        self._probes.pop(member.text, None)

    def _send(self, probe: Probe) -> None:
        probe.sent += 1
        self.echoes.append((probe.member.text, probe.token))
        if not probe.member.answers_pings:
            self.syns.append((probe.member.text, probe.token))


class Sample:
    """The results of the last scheduled probes, of nodes that have ever answered."""

    def __init__(self) -> None:
        self._results: deque[tuple[float, Member, bool]] = deque()

    def add(self, member: Member, now: float, *, missed: bool) -> None:
        self._results.append((now, member, missed))

    def counts(self, now: float) -> tuple[int, int]:
        """Return how many nodes missed their last probe, and how many were probed."""
        while self._results and now - self._results[0][0] > SAMPLE_SECONDS:
            self._results.popleft()
        latest = {member: missed for _, member, missed in self._results}
        return sum(latest.values()), len(latest)

    def clear(self) -> None:
        self._results.clear()
