# SPDX-License-Identifier: Apache-2.0
"""Which nodes do not answer: the rules of --endpoint-health=nodes.

A node's life is what its kernel answers, not its agent, which may be paused while its programs
serve: echo replies, and from a node that has never sent one the answer to a SYN. Each node judges
for itself, after SWIM (Das, Gupta, Motivala, 2002):

- It probes all others in turn: in ROUND_SECONDS, but LEAST_PROBES each second at least. So each
  node is probed that often each second by some others, however many there are.
- A node that misses ATTEMPTS in succession is suspected. Who notices that first tells all others;
  each of them then probes the node itself, and asks ASKED other agents, drawn at random.
- The node is silent if it missed this node's own probe, and all agents that have answered say so
  too. An agent that does not answer counts neither for nor against. If none answers, others are
  asked; if those do not either, the node is not silent, because this node may be the cut one.
- A node that has never answered this one is unknown, never silent.
- While more than a third of the nodes seem silent, none is: this node is the cut one.
- The first answer of a silent node ends it, and so does another agent whom it answers.

The caller calls ``turn`` each TURN_SECONDS, after ``answered`` and ``told`` for what has come, and
sends ``echoes``, ``syns`` and ``messages``. ``now`` is always one monotonic clock, in seconds.
"""

import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from msgspec import Struct

from ebpflb.model.addresses import Address
from ebpflb.model.node_members import Member, Members
from ebpflb.model.node_messages import Kind, Message

# Nodes that are suspected, and what other agents say about them.

ASKED = 3  # agents in a round of questions
LEAST = 2  # of them have to miss the node too, if there are as many that can be asked
ANSWER_SECONDS = 1.1  # an asked agent may have to probe for 0.8 s
ROUNDS = 3  # of questions


class Verdict(Enum):
    """What comes of a suspicion."""

    OPEN = "answers are missing"
    SILENT = "this node and all that have answered miss it"
    ALIVE = "it answers another node"
    NOBODY_ANSWERS = "this node may be the cut one"


class _Suspicion(Struct, eq=False):
    """``has_missed``: this node's own probe. ``missed``: the agents that say so too."""

    number: int
    until: float
    asked: list[str] = []
    missed: set[str] = set()
    has_missed: bool = False
    rounds: int = 0


class Suspicions:
    """The suspected nodes; the questions are to be sent to the addresses beside them."""

    def __init__(self, members: Members, rng: random.Random) -> None:
        self._members, self._rng = members, rng
        self._open: dict[Member, _Suspicion] = {}
        self._judged: dict[Member, _Suspicion] = {}  # silent, but late answers may come
        self._questions: list[tuple[str | None, Message]] = []

    def __contains__(self, member: Member) -> bool:
        return member in self._open

    def take_questions(self) -> list[tuple[str | None, Message]]:
        """Return, and forget, the questions."""
        questions, self._questions = self._questions, []
        return questions

    def begin(self, member: Member, now: float, without: Collection[str] = ()) -> None:
        """Ask some agents about a node; not those ``without``, which are silent themselves."""
        self._open[member] = _Suspicion(self._rng.getrandbits(64), now)
        self._ask(member, now, without)

    def missed(self, member: Member, now: float) -> Verdict:
        """Note that the node missed this node's own probe."""
        self._open[member].has_missed = True
        return self._judge(member, now)

    def told(self, member: Member, sender: str, message: Message) -> Verdict:
        """Take an answer; one to no question is ignored."""
        suspicion = self._open.get(member) or self._judged.get(member)
        if not suspicion or message.number != suspicion.number or sender not in suspicion.asked:
            return Verdict.OPEN
        if message.kind is Kind.ALIVE:
            self.end(member)
            return Verdict.ALIVE
        suspicion.missed.add(sender)
        return self._judge(member, None) if member in self._open else Verdict.OPEN

    def due(self, now: float) -> Iterator[tuple[Member, Verdict]]:
        """Yield the suspected nodes whose answers should have come."""
        for member in [it for it, each in self._open.items() if now >= each.until]:
            yield member, self._judge(member, now)

    def clear(self) -> None:
        """Forget all: what is still silent is suspected again."""
        self._open.clear()

    def end(self, member: Member) -> None:
        self._open.pop(member, None)
        self._judged.pop(member, None)

    def _judge(self, member: Member, now: float | None) -> Verdict:
        """``now``: None before the time for answers has ended."""
        each = self._open[member]
        is_late = now is not None and now >= each.until
        if each.has_missed and each.missed and len(each.missed) == len(each.asked):
            return self._silent(member)
        if now is None or not is_late:
            return Verdict.OPEN
        if each.has_missed and len(each.missed) >= LEAST:
            return self._silent(member)
        if each.rounds < ROUNDS and self._ask(member, now):
            return Verdict.OPEN
        if each.has_missed and each.missed:
            return self._silent(member)
        self.end(member)
        return Verdict.NOBODY_ANSWERS

    def _silent(self, member: Member) -> Verdict:
        self._judged[member] = self._open.pop(member)
        return Verdict.SILENT

    def _ask(self, member: Member, now: float, without: Collection[str] = ()) -> bool:
        """Ask agents that were not asked yet; return False if there are none."""
        each = self._open[member]
        others = self._members.others(ASKED, {member.text, *each.asked, *without})
        message = Message(Kind.ASK, member.about, each.number)
        self._questions += [(it.text, message) for it in others]
        each.asked += [it.text for it in others]
        each.until, each.rounds = now + ANSWER_SECONDS, each.rounds + 1
        return bool(others)


# Probes that wait for their answers, and what the last ones told.

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


TURN_SECONDS = 0.05
ROUND_SECONDS, LEAST_PROBES = 30.0, 12
AGAIN_SECONDS, MOST_AGAIN = 0.2, 32  # between probes of a silent node; of all, in a second
CONFIRMED_SECONDS = 10.0  # between questions to other agents about a silent node
FRESH_SECONDS = 0.5  # how old a probe may be to answer a question
HEARD_SECONDS = 2.0  # between two messages to all about a node
STALLED_SECONDS = 0.5  # a longer pause between turns: nothing that is missing counts
MOST_ON_DEMAND = 256  # probes a second that others have asked for
MOST_TOLD = 8  # nodes a second of which all others are told
PART = 3  # if more than one node in three seems silent, this one is the cut one

STATES = (ANSWERING, SILENT, UNKNOWN) = ("answering", "silent", "unknown")


class SilentNodes(NamedTuple):
    """A message to the agent's loop. ``noticed``: those that this node noticed first."""

    nodes: frozenset[str]
    noticed: frozenset[str]


NO_SILENT_NODES = SilentNodes(frozenset(), frozenset())


class NodeHealth:
    """What one node knows about the others; ``rng`` draws orders, numbers and whom to ask.

    ``echoes`` and ``syns``: the addresses and tokens of echo requests and SYNs. ``messages``: with
    the address of the receiver; None means all others. The caller empties all three.
    """

    def __init__(self, own_name: str, rng: random.Random) -> None:
        self._rng = rng
        self.members = Members(own_name, rng)
        self._probes, self._sample = NodeProbes(rng), Sample()
        self._suspicions = Suspicions(self.members, rng)
        self._silent: dict[Member, float] = {}  # -> when others were asked last
        self._missing: set[Member] = set()  # that missed their last probe
        self._known = 0  # nodes that have answered
        self._credit = self._again_credit = 0.0
        self._on_demand, self._told_credit = float(MOST_ON_DEMAND), float(MOST_TOLD)
        self._last_turn: float | None = None
        self.is_cut = False
        self.messages: list[tuple[str | None, Message]] = []

    @property
    def echoes(self) -> list[tuple[str, int]]:
        return self._probes.echoes

    @property
    def syns(self) -> list[tuple[str, int]]:
        return self._probes.syns

    @property
    def silent(self) -> SilentNodes:
        """The nodes that do not answer; none while this node is cut off."""
        if self.is_cut or not self._silent:
            return NO_SILENT_NODES
        noticed = frozenset(each.name for each in self._silent if each.noticed)
        return SilentNodes(frozenset(each.name for each in self._silent), noticed)

    @property
    def counts(self) -> dict[str, int]:
        """The number of other nodes in each of STATES, whether this node is cut off or not."""
        known, silent = self._known, len(self._silent)
        return {ANSWERING: known - silent, SILENT: silent, UNKNOWN: len(self.members) - known}

    def set_nodes(self, nodes: Mapping[str, Address], now: float) -> None:
        """Set the nodes that agents run on, with this one."""
        self._forget(self.members.set(nodes, now))

    def answered(self, text: str, token: int, now: float, *, is_ping: bool = True) -> None:
        """Take an echo reply, or an answer to a SYN; one that answers no probe is ignored."""
        probe = self._probes.answered(text, token)
        if probe is None:
            return
        member = probe.member
        self._known += not member.has_answered
        member.answered = probe.begun
        member.answers_pings |= is_ping
        self._revive(member)
        if probe.is_scheduled:
            self._sample.add(member, now, missed=False)
        for asker, number in probe.askers:
            self._tell(asker, Kind.ALIVE, member, number)

    def told(self, text: str, message: Message, now: float) -> None:
        """Take what the agent at this address says."""
        member = self.members.about(message.about)
        if member is None or not member.has_answered:
            return
        match message.kind:
            case Kind.SUSPECT:
                self._suspect(member, now)
            case Kind.ASK:
                self._asked(member, text, message.number, now)
            case Kind.ALIVE | Kind.MISSED:
                verdict = self._suspicions.told(member, text, message)
                self._apply(member, verdict, now)

    def turn(self, now: float) -> None:
        """Do what is due: judge what is missing, and send the next probes."""
        self._restart_if_stalled(now)
        self._forget(self.members.left(now))
        for probe in self._probes.missed(now):
            self._missed(probe.member, now, is_scheduled=probe.is_scheduled)
            for asker, number in probe.askers:
                self._say_missed(probe.member, asker, number)
        for member, verdict in self._suspicions.due(now):
            self._apply(member, verdict, now)
        self._begin_probes(now)
        self._confirm_silent(now)
        self.is_cut = self._seems_cut(now)
        self.messages += self._suspicions.take_questions()

    def _restart_if_stalled(self, now: float) -> None:
        """This process was paused: what it did not read in time may have come."""
        passed = 0.0 if self._last_turn is None else now - self._last_turn
        if passed > STALLED_SECONDS:
            self._probes.restart(now)
            self._suspicions.clear()
            self._sample.clear()
        self._last_turn = now
        self._credit += min(passed, STALLED_SECONDS) * self._probes_a_second()
        self._again_credit = min(self._again_credit + MOST_AGAIN * passed, MOST_AGAIN)
        self._on_demand = min(self._on_demand + MOST_ON_DEMAND * passed, MOST_ON_DEMAND)
        self._told_credit = min(self._told_credit + MOST_TOLD * passed, MOST_TOLD)

    def _probes_a_second(self) -> float:
        return min(len(self.members), max(LEAST_PROBES, len(self.members) / ROUND_SECONDS))

    def _begin_probes(self, now: float) -> None:
        count = int(self._credit)
        self._credit -= count
        for member in self.members.next(count):
            self._probes.begin(member, now, is_scheduled=True)
        for member in self._silent:
            if self._again_credit < 1:
                break
            if now - member.missed >= AGAIN_SECONDS and self._probes.begin(member, now, attempts=1):
                self._again_credit -= 1

    def _missed(self, member: Member, now: float, *, is_scheduled: bool) -> None:
        """Note that a node missed all attempts of a probe, which ended just now."""
        member.missed = now
        if not member.has_answered:
            return
        self._missing.add(member)
        if is_scheduled:
            self._sample.add(member, now, missed=True)
        if member in self._silent or self.is_cut:
            return
        if member not in self._suspicions:
            self._begin_suspicion(member, now)
        self._tell_all(member, now)
        self._apply(member, self._suspicions.missed(member, now), now)

    def _tell_all(self, member: Member, now: float) -> None:
        """Tell all others of a suspicion, if no one has just done so, or said that it is wrong."""
        was_heard = now - member.suspected < HEARD_SECONDS
        was_cleared = now - member.cleared < CONFIRMED_SECONDS
        if not was_heard and not was_cleared and self._told_credit >= 1:
            self._told_credit -= 1
            member.suspected, member.noticed = now, True
            self.messages.append((None, Message(Kind.SUSPECT, member.about)))

    def _suspect(self, member: Member, now: float) -> None:
        """Look at a node that another one suspects, and ask others at the same time."""
        member.suspected = now
        is_known = member in self._silent or member in self._suspicions
        if is_known or self.is_cut or _is_fresh(member.answered, now):
            return
        if self._may_probe():
            self._probes.begin(member, now)
            self._begin_suspicion(member, now)

    def _begin_suspicion(self, member: Member, now: float) -> None:
        self._suspicions.begin(member, now, without=[each.text for each in self._silent])

    def _asked(self, member: Member, asker: str, number: int, now: float) -> None:
        """Answer with what is known, or when a probe has ended."""
        if _is_fresh(member.answered, now):
            self._tell(asker, Kind.ALIVE, member, number)
        elif _is_fresh(member.missed, now):
            self._say_missed(member, asker, number)
        elif self._may_probe():
            self._probes.begin(member, now, asker=(asker, number))

    def _may_probe(self) -> bool:
        """Whether others have not asked for too many probes in the last second."""
        may = self._on_demand >= 1
        self._on_demand -= may
        return may

    def _say_missed(self, member: Member, asker: str, number: int) -> None:
        """Say that a node does not answer; a node that is cut off cannot tell."""
        if not self.is_cut:
            self._tell(asker, Kind.MISSED, member, number)

    def _tell(self, whom: str, kind: Kind, member: Member, number: int) -> None:
        self.messages.append((whom, Message(kind, member.about, number)))

    def _apply(self, member: Member, verdict: Verdict, now: float) -> None:
        match verdict:
            case Verdict.SILENT:
                self._silent[member] = now
            case Verdict.ALIVE:
                member.cleared = now
                self._silent.pop(member, None)
            case Verdict.NOBODY_ANSWERS:
                self._silent.pop(member, None)

    def _confirm_silent(self, now: float) -> None:
        """Ask about silent nodes again: others may reach what this node does not."""
        for member, asked in [*self._silent.items()]:
            if now - asked >= CONFIRMED_SECONDS and self._may_probe():
                self._silent[member] = now
                self._begin_suspicion(member, now)
                self._suspicions.missed(member, now)

    def _seems_cut(self, now: float) -> bool:
        """Whether more than a third of all nodes seem silent, or suddenly more than half."""
        missed, sampled = self._sample.counts(now)
        return PART * len(self._missing) > self._known + 1 or 2 * missed > sampled + 1

    def _revive(self, member: Member) -> None:
        self._silent.pop(member, None)
        self._missing.discard(member)
        self._suspicions.end(member)
        member.noticed = False

    def _forget(self, members: list[Member]) -> None:
        for each in members:
            self._revive(each)
            self._probes.end(each)
            self._known -= each.has_answered


def _is_fresh(time: float, now: float) -> bool:
    return now - time <= FRESH_SECONDS
