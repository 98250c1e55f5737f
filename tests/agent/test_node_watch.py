# SPDX-License-Identifier: Apache-2.0
"""The thread that probes nodes: when it runs, what it drops, and what it costs at most."""

import logging
import math
from collections import Counter
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.agent.node_watch import (
    MOST_DATAGRAMS,
    MOST_SENT,
    RETRY_SECONDS,
    NodeWatch,
    Wanted,
)
from ebpflb.lab.agents import wait_until
from ebpflb.model.addresses import number
from ebpflb.model.node_health import TURN_SECONDS, SilentNodes
from ebpflb.model.node_messages import FORGED, STRANGER, Kind, Message, open_sealed, seal

KEY, PORT = b"k" * 16, 10246
NODES = {f"node-{n}": ip_address(f"10.0.0.{n}") for n in range(1, 5)}
OWN, OTHER = (str(NODES[name]) for name in ("node-1", "node-2"))


class FakeSockets:
    """All nodes answer at the next turn, except those that are ``down``; ``deaf``: no pings."""

    def __init__(self, own: str, port: int) -> None:
        self.where = own, port
        self.is_open = True
        self.down: set[str] = set()
        self.deaf: set[str] = set()
        self.probed: list[str] = []
        self.syns: list[tuple[str, int]] = []
        self.sent: list[tuple[str, bytes]] = []
        self.come: list[tuple[bytes, str]] = []
        self._replies: list[tuple[str, int]] = []

    def probe(self, address: str, token: int) -> None:
        self.probed.append(address)
        if address not in self.down | self.deaf:
            self._replies.append((address, token))

    def send_syn(self, address: str, token: int) -> None:
        if address not in self.down:
            self.syns.append((address, token))

    def send(self, address: str, datagram: bytes) -> None:
        self.sent.append((address, datagram))

    def replies(self) -> list[tuple[str, int]]:
        replies, self._replies = self._replies, []
        return replies

    def syn_answers(self) -> list[tuple[str, int]]:
        answers, self.syns = self.syns, []
        return answers

    def datagrams(self, most: int) -> list[tuple[bytes, str]]:
        read, self.come = self.come[:most], self.come[most:]
        return read

    def close(self) -> None:
        self.is_open = False


class Watched:
    """A watch whose turns the test takes, by its own clock; ``dropped`` is counted by reason."""

    def __init__(self) -> None:
        self.now, self.error = 100.0, ""
        self.opened: list[FakeSockets] = []
        self.emitted: list[SilentNodes] = []
        self.dropped: Counter[str] = Counter()
        make: Any = self._make
        clock = lambda: self.now  # noqa: E731
        self.watch = NodeWatch("node-1", KEY, self.emitted.append, self._count, make, clock)
        self.watch.thread.start = lambda: None  # type: ignore[method-assign]

    def _make(self, own: str, port: int) -> FakeSockets:
        if self.error:
            raise OSError(self.error)
        self.opened.append(FakeSockets(own, port))
        return self.opened[-1]

    def _count(self, reason: str, count: int) -> None:
        self.dropped[reason] += count

    @property
    def sockets(self) -> FakeSockets:
        return self.opened[-1]

    def turns(self, seconds: float) -> None:
        for _ in range(round(seconds / TURN_SECONDS)):
            self.now += TURN_SECONDS
            if self.watch.due <= self.now:
                self.watch.turn()


@pytest.fixture
def watched() -> Watched:
    """All nodes have answered."""
    made = Watched()
    made.watch.set(Wanted(NODES, PORT))
    made.turns(3)
    return made


def test_while_no_one_wants_it_there_is_no_thread_and_no_socket() -> None:
    opened: list[object] = []
    make: Any = lambda *where: opened.append(where)  # noqa: E731
    watch = NodeWatch("node-1", KEY, lambda silent: None, make=make)
    watch.start()
    assert (watch.thread.ident, watch.due, opened) == (None, math.inf, [])
    watch.stop()


def test_it_begins_and_ends_when_it_is_wanted() -> None:
    """In its own thread."""
    opened: list[FakeSockets] = []

    def make(own: str, port: int) -> Any:
        opened.append(FakeSockets(own, port))
        return opened[-1]

    watch = NodeWatch("node-1", KEY, lambda silent: None, make=make)
    watch.start()
    for _ in range(2):
        watch.set(Wanted(NODES, PORT))
        wait_until("it probes", lambda: bool(opened) and bool(opened[-1].probed))
        watch.set(None)
        wait_until("it has ended", lambda: not opened[-1].is_open and watch.due == math.inf)
        assert [each.where for each in opened] == [(OWN, PORT)]
        opened.clear()
    watch.set(Wanted(NODES, PORT))
    wait_until("it probes", lambda: bool(opened))
    watch.stop()
    assert not opened[0].is_open


def test_a_silent_node_is_emitted_once_and_when_it_answers(watched: Watched) -> None:
    watched.sockets.down = {OTHER}
    answer_all(watched, Kind.MISSED, 4.0)
    assert watched.emitted == [SilentNodes(frozenset({"node-2"}), frozenset({"node-2"}))]
    watched.sockets.down = set()
    watched.turns(2)
    assert [each.nodes for each in watched.emitted[1:]] == [frozenset()]


def test_a_node_that_answers_no_pings_is_asked_by_tcp() -> None:
    """And then by both; one that answers pings by these alone."""
    made = Watched()
    made.watch.set(Wanted(NODES, PORT))
    made.turns(0.1)
    made.sockets.deaf = {OTHER}
    made.turns(3)
    assert made.watch.health.counts == {"answering": 3, "silent": 0, "unknown": 0}
    asked: set[str] = set()
    for _ in range(40):
        made.turns(TURN_SECONDS)
        asked |= {address for address, _ in made.sockets.syns}
    assert asked == {OTHER}
    made.sockets.down = {OTHER}
    answer_all(made, Kind.MISSED, 4.0)
    assert [each.nodes for each in made.emitted] == [{"node-2"}]


def answer_all(watched: Watched, kind: Kind, seconds: float) -> None:
    """The other agents answer each question so."""
    time = 1
    for _ in range(round(seconds / TURN_SECONDS)):
        asked, watched.sockets.sent = watched.sockets.sent, []
        for address, datagram in asked:
            opened = open_sealed(KEY, number(NODES["node-1"]), datagram)
            assert opened
            if opened.message.kind is Kind.ASK and address not in watched.sockets.down:
                time += 1
                said = opened.message._replace(kind=kind)
                sealed = seal(KEY, number(ip_address(address)), said, time)
                watched.sockets.come.append((sealed, address))
        watched.turns(TURN_SECONDS)


def test_what_strangers_send_is_dropped_and_counted(watched: Watched) -> None:
    """Nothing is answered, and nobody is probed for it."""
    about = number(NODES["node-3"])
    other = number(NODES["node-2"])
    forged = seal(b"another key, guessed", other, Message(Kind.ASK, about, 5), 9)
    watched.sockets.come = [(forged, OTHER), (b"x", OTHER), (forged, "198.51.100.1")]
    watched.turns(1)
    assert watched.dropped == {FORGED: 1, STRANGER: 2}
    assert not watched.sockets.sent


def test_a_flood_costs_no_more_than_so_many_a_turn(watched: Watched) -> None:
    watched.sockets.come = [(b"x", OTHER)] * 10_000
    watched.turns(1)
    assert watched.dropped[STRANGER] <= MOST_DATAGRAMS / TURN_SECONDS
    watched.sockets.come.clear()


def test_a_question_is_answered(watched: Watched) -> None:
    """By what this node's probe finds; the answer is as long as the question."""
    about, other = number(NODES["node-3"]), number(NODES["node-2"])
    question = seal(KEY, other, Message(Kind.ASK, about, 77), 5)
    watched.sockets.come = [(question, OTHER)]
    watched.turns(2)
    [(address, datagram)] = watched.sockets.sent
    opened = open_sealed(KEY, number(NODES["node-1"]), datagram)
    assert opened
    assert (address, opened.message) == (OTHER, Message(Kind.ALIVE, about, 77))
    assert len(datagram) == len(question)


def test_all_others_are_told_in_parts() -> None:
    """So that other work is not kept waiting, and the device's queue does not overflow."""
    made = Watched()
    many = {f"node-{n}": ip_address(0x0A000000 + n) for n in range(1, 2 * MOST_SENT)}
    made.watch.set(Wanted(many, PORT))
    made.turns(40)
    made.sockets.down = {str(many["node-9"])}
    told: list[int] = []
    while not told or told[-1]:
        made.sockets.sent.clear()
        made.turns(TURN_SECONDS)
        suspected = [
            address
            for address, datagram in made.sockets.sent
            if (opened := open_sealed(KEY, number(many["node-1"]), datagram))
            and opened.message.kind is Kind.SUSPECT
        ]
        if suspected or told:
            told.append(len(suspected))
    assert told == [MOST_SENT, len(many) - 2 - MOST_SENT, 0]


def test_a_socket_that_cannot_be_opened_is_said_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Watched()
    made.error = "Address already in use"
    made.watch.set(Wanted(NODES, PORT))
    made.turns(2 * RETRY_SECONDS + 1)
    assert made.watch.error == "Address already in use"
    assert len([it for it in caplog.records if it.levelno == logging.ERROR]) == 1
    made.error = ""
    made.turns(RETRY_SECONDS)
    assert made.watch.error is None
    assert made.sockets.probed


def test_a_node_whose_own_agent_is_not_listed_says_so() -> None:
    made = Watched()
    made.watch.set(Wanted({"node-2": NODES["node-2"]}, PORT))
    made.turns(1)
    assert made.watch.error == "no EndpointSlice of the agents' Service has the node node-1"
    made.watch.set(Wanted(NODES, PORT))
    made.turns(1)
    assert made.watch.error is None


def test_another_port_is_another_socket(watched: Watched) -> None:
    watched.watch.set(Wanted(NODES, PORT + 1))
    watched.turns(1)
    assert [each.where[1] for each in watched.opened] == [PORT, PORT + 1]
    assert [each.is_open for each in watched.opened] == [False, True]


def test_when_this_node_is_the_cut_one_it_says_so(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.sockets.down = {str(it) for name, it in NODES.items() if name != "node-1"}
    watched.turns(10)
    assert not watched.emitted
    assert "this node seems to be cut off" in caplog.text


def test_a_node_that_is_cut_off_does_not_go_on_telling_all_others() -> None:
    """What it has not sent when it knows is forgotten."""
    made = Watched()
    many = {f"node-{n}": ip_address(0x0A000000 + n) for n in range(1, 6 * MOST_SENT)}
    made.watch.set(Wanted(many, PORT))
    made.turns(40)
    made.sockets.down = {str(it) for it in many.values()}
    while not made.watch.health.is_cut:
        made.turns(TURN_SECONDS)
    made.sockets.sent.clear()
    made.turns(1)
    assert len(made.sockets.sent) < MOST_SENT


def test_the_end_brings_all_back(watched: Watched) -> None:
    watched.sockets.down = {OTHER}
    answer_all(watched, Kind.MISSED, 4.0)
    watched.watch.set(None)
    watched.turns(1)
    assert not watched.emitted[-1].nodes
    assert not watched.sockets.is_open
