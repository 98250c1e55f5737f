# SPDX-License-Identifier: Apache-2.0
"""Nodes that are suspected, and what other agents say about them (node_health.py)."""

import random
from collections.abc import Collection, Iterator
from enum import Enum

from msgspec import Struct

from ebpflb.model.node_members import Member, Members
from ebpflb.model.node_messages import Kind, Message

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
