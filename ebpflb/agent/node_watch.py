# SPDX-License-Identifier: Apache-2.0
"""Probe the other nodes, and ask other agents about them, in one thread.

It starts when a Service first wants it (--endpoint-health=nodes); while none does, no socket is
open. What is judged is in model/node_health.py.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ebpflb.errors import in_words, log_once
from ebpflb.kernel.node.node_sockets import NodeSockets
from ebpflb.model import node_messages
from ebpflb.model.addresses import Address
from ebpflb.model.node_health import NO_SILENT_NODES, TURN_SECONDS, NodeHealth, SilentNodes
from ebpflb.model.node_messages import Mail, Message
from ebpflb.workers import DueWorker

log = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
MOST_DATAGRAMS = 100  # in a turn: a flood costs no more than that; the kernel drops the others
MOST_SENT = 500  # in a turn, of what all others are told

_CUT = "more than a third of the nodes seem silent, so this node seems to be cut off: none is set"
_CUT += " aside"


class Wanted(NamedTuple):
    """The nodes that agents run on, with their addresses, and the agents' UDP port."""

    nodes: Mapping[str, Address]
    port: int


class NodeWatch(DueWorker):
    """``emit`` gets the silent nodes after each change; ``key`` seals what agents say.

    ``on_dropped`` gets why datagrams are dropped, and how many. ``make`` opens the sockets.
    ``error``: why nodes are not probed, if they should be.
    """

    def __init__(
        self,
        own_name: str,
        key: bytes,
        emit: Callable[[SilentNodes], None],
        on_dropped: Callable[[str, int], None] = lambda reason, count: None,
        make: Callable[[str, int], NodeSockets] = NodeSockets,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("node-health", clock)
        self._own_name, self._key, self._emit, self._make = own_name, key, emit, make
        self._on_dropped = on_dropped
        self._wanted: Wanted | None = None
        self._followed: Wanted | None = None
        self._sockets: NodeSockets | None = None
        self._due = math.inf
        self.error: str | None = None
        self._begin()

    def _begin(self) -> None:
        """Know nothing about the nodes."""
        self.health = NodeHealth(self._own_name, random.Random())
        self.mail = Mail(self._key)
        self._emitted = NO_SILENT_NODES
        self._was_cut = False
        self._to_all: list[tuple[list[str], bytes]] = []

    @property
    def due(self) -> float:
        return self._due

    def start(self) -> None:
        """Do nothing: the thread starts when it is wanted."""

    def set(self, wanted: Wanted | None) -> None:
        """Watch these nodes; None ends it."""
        if wanted == self._wanted:
            return
        with self.changed:
            self._wanted, self._due = wanted, self._clock()
            self.changed.notify()
        if wanted and not self.thread.ident:
            super().start()

    def stop(self) -> None:
        super().stop()
        self._close_sockets()

    def turn(self) -> None:
        """Take what has come, judge what is missing, and send what is due."""
        begun = self._clock()
        wanted = self._follow()
        if self._sockets:
            self._take()
            self.health.turn(self._clock())
            self._send()
            self._say()
        with self.changed:
            if wanted == self._wanted:
                pause = TURN_SECONDS if self._sockets else RETRY_SECONDS
                self._due = begun + pause if wanted else math.inf

    def _follow(self) -> Wanted | None:
        """Open or close the sockets as is wanted, and set the nodes; return what is wanted."""
        wanted, before = self._wanted, self._followed
        self._followed = wanted
        if wanted is None:
            self._end(was_wanted=before is not None)
        elif wanted != before:
            self.health.set_nodes(wanted.nodes, self._clock())
            self.mail.keep(frozenset(each.about for each in self.health.members))
            if before and before.port != wanted.port:
                self._close_sockets()
        if wanted and self._sockets is None:
            self._open(wanted.port)
        return wanted

    def _open(self, port: int) -> None:
        own = self.health.members.own
        try:
            if own is None:
                self._fail(f"no EndpointSlice of the agents' Service has the node {self._own_name}")
                return
            self._sockets = self._make(own.text, port)
        except OSError as error:
            self._fail(in_words(error))
        else:
            self.error = None
            log.info("other nodes are probed, from %s, and agents asked at %d", own.text, port)

    def _fail(self, reason: str) -> None:
        line = "nodes that do not answer are not noticed: %s"
        self.error = log_once(log.error, line, reason, self.error)

    def _take(self) -> None:
        """Take what has come, before anything that is missing is judged."""
        assert self._sockets
        now = self._clock()
        for address, token in self._sockets.replies():
            self.health.answered(address, token, now)
        for address, token in self._sockets.syn_answers():
            self.health.answered(address, token, now, is_ping=False)
        for datagram, address in self._sockets.datagrams(MOST_DATAGRAMS):
            member = self.health.members.at(address)
            message = self.mail.open(member.about if member else None, datagram, now)
            if message:
                self.health.told(address, message, now)
        for reason, count in self.mail.dropped.items():
            self._on_dropped(reason, count)
        self.mail.dropped.clear()

    def _send(self) -> None:
        assert self._sockets
        for address, token in self.health.echoes:
            self._sockets.probe(address, token)
        self.health.echoes.clear()
        for address, token in self.health.syns:
            self._sockets.send_syn(address, token)
        self.health.syns.clear()
        for whom, message in self.health.messages:
            self._tell(whom, message)
        self.health.messages.clear()
        self._tell_all()

    def _tell(self, address: str | None, message: Message) -> None:
        own = self.health.members.own
        assert self._sockets and own
        datagram = node_messages.seal(self._key, own.about, message, time.time_ns())
        if address is None:
            everyone = [each.text for each in self.health.members if each.about != message.about]
            random.shuffle(everyone)
            self._to_all.append((everyone, datagram))
        else:
            self._sockets.send(address, datagram)

    def _tell_all(self) -> None:
        """Send a part of what all others are told."""
        assert self._sockets
        if self.health.is_cut:
            self._to_all.clear()
        if not self._to_all:
            return
        everyone, datagram = self._to_all[0]
        for address in everyone[:MOST_SENT]:
            self._sockets.send(address, datagram)
        del everyone[:MOST_SENT]
        if not everyone:
            self._to_all.pop(0)

    def _say(self) -> None:
        if self.health.is_cut and not self._was_cut:
            log.warning("%s", _CUT)
        self._was_cut = self.health.is_cut
        if (silent := self.health.silent) != self._emitted:
            self._emitted = silent
            self._emit(silent)

    def _end(self, *, was_wanted: bool) -> None:
        self._close_sockets()
        if was_wanted:
            if self._emitted.nodes:
                self._emit(NO_SILENT_NODES)
            self._begin()
            self.error = None

    def _close_sockets(self) -> None:
        if self._sockets:
            self._sockets.close()
        self._sockets = None
