# SPDX-License-Identifier: Apache-2.0
"""Clients' packets to all frontends, by the natively compiled device hooks.

A flow's first packet must go to an endpoint that one of the views allows; an open flow keeps its
backend whatever the agent does, and its replies come from the frontend. Datagrams get another
backend only if their own is gone.
"""

from itertools import cycle
from socket import htons
from typing import Any, NamedTuple

from tests.simulation.affinity import Affinity
from tests.simulation.build import Library
from tests.simulation.expected import Expected, Views, Wrong
from tests.simulation.oracle import Served
from tests.simulation.places import (
    CLUSTER_IPS,
    FRONTENDS,
    NODE_ADDRESS,
    NUMBERS,
    SENDERS,
    Asking,
    Where,
    is_here,
    number_of,
    spelled,
    version_of,
)

FIRST_PORT, LAST_PORT = 40_000, 60_000
PROBE_PORT = 33_333  # of flows that no one opens
PARTS = 11  # of the frontends one part is asked at a time
UDP_SILENCE = 2.5  # seconds, after which a flow of datagrams may have been swept


class Probe(NamedTuple):
    """A flow's first packet: its frontend and its client."""

    where: Where
    client: Asking


PROBES = [Probe(where, client) for client in SENDERS for where in FRONTENDS]
_MOST_OPEN = 6


class Flow:
    """An open flow; ``talk`` is the C side's view of it."""

    def __init__(self, talk: Any, probe: int, outcome: int, used: float) -> None:
        self.talk, self.probe, self.outcome, self.used = talk, probe, outcome, used

    @property
    def is_tcp(self) -> bool:
        return PROBES[self.probe].where[2] == "TCP"


class Packets:
    """A part of ``Clients``, with the same methods, for packets."""

    def __init__(self, library: Library, affinity: Affinity) -> None:
        self.ffi, self.lib = library.ffi, library.lib
        self.affinity = affinity
        self.lib.node_address = number_of(NODE_ADDRESS)
        self.probes = self.ffi.new("struct conversation[]", len(PROBES))
        self.after = self.ffi.new("struct conversation[]", len(PROBES))
        self.outcomes = self.ffi.new("long long[]", len(PROBES))
        for index in range(len(PROBES)):
            self._fill(self.probes[index], index, PROBE_PORT)
        self.one = self.ffi.new("struct conversation *")
        self.replied = self.ffi.new("int *")
        self.ports = cycle(range(FIRST_PORT, LAST_PORT))
        self.flows: list[Flow] = []
        self.views = Views([{}])
        self.all_expected: list[Expected] = []

    def forget(self) -> None:
        self.flows = []

    def expect(self, views: Views) -> None:
        self.views = views
        self.all_expected = [views.at(where, client) for where, client in PROBES]

    def ask(self, turn: int, now: float) -> None:
        """Open flows to the next part of the frontends, and continue open ones."""
        count, first = len(PROBES), turn % PARTS
        self.lib.talk_all(self.probes, count, first, PARTS, self.after, self.outcomes)
        outcomes = self.ffi.unpack(self.outcomes, count)
        for index in range(first, count, PARTS):
            self._judge(index, outcomes[index], self.after[index])
        for flow in [*self.flows]:
            self._go_on(flow, now)

    def ask_one(self, number: int, now: float) -> None:
        """Send a packet that may be interrupted: of an open flow, or a new one."""
        if self.flows and number % 2:
            self._go_on(self.flows[number % len(self.flows)], now)
            return
        index = number * 7 % len(PROBES)
        self._fill(self.one, index, PROBE_PORT)
        self.lib.talk_all(self.one, 1, 0, 1, self.after, self.outcomes)
        self._judge(index, self.outcomes[0], self.after[0])

    def open(self, which: int, now: float) -> None:
        """Open a flow that stays, to a frontend with backends; the oldest flow ends for it."""
        leading = [n for n, each in enumerate(self.all_expected) if max(each.allowed) >= 0]
        if not leading:
            return
        index = leading[which % len(leading)]
        talk = self.ffi.new("struct conversation *")
        self._fill(talk, index, next(self.ports))
        outcome = self.lib.talk_open(talk, self.replied)
        self._judge(index, outcome, talk)
        if outcome < 0:
            return
        self._check_reply(index)
        self.affinity.answered(PROBES[index].client.address)
        if len(self.flows) == _MOST_OPEN:
            self.close(0)
        self.flows.append(Flow(talk, index, outcome, now))

    def close(self, number: int) -> None:
        """Let both sides end a flow."""
        if self.flows:
            flow = self.flows.pop(number % len(self.flows))
            if flow.is_tcp:
                self.lib.talk_close(flow.talk)

    def _go_on(self, flow: Flow, now: float) -> None:
        where, client = PROBES[flow.probe]
        expected = self.all_expected[flow.probe]
        outcome = self.lib.talk_on(flow.talk, self.replied)
        keeps = flow.is_tcp or (
            flow.outcome in expected.kept and now - flow.used < UDP_SILENCE and flow.outcome >= 0
        )
        flow.used = now
        if keeps and outcome != flow.outcome:
            raise Wrong(
                f"a flow from {client.address} to {where} has lost its backend: "
                f"{spelled(outcome)}, not {spelled(flow.outcome)}"
            )
        if outcome != flow.outcome:
            flow.outcome = outcome
            self._judge(flow.probe, outcome, flow.talk)
            self.affinity.answered(client.address)
        elif not flow.is_tcp:
            expected.judge_kept(f"a flow from {client.address} to {where}", outcome)
        if outcome >= 0:
            self._check_reply(flow.probe)

    def _check_reply(self, index: int) -> None:
        where, client = PROBES[index]
        if not self.replied[0]:
            raise Wrong(f"a reply from {where} does not come to {client.address}")

    def _judge(self, index: int, outcome: int, talk: Any) -> None:
        (where, client), expected = PROBES[index], self.all_expected[index]
        if outcome not in expected.allowed:
            raise Wrong(f"{client.address} to {where}: {spelled(outcome)}, not {expected}")
        if expected.services:
            self.affinity.judge(client.address, where, expected, outcome)
        if outcome >= 0:
            self._check_source(index, outcome, talk)

    def _check_source(self, index: int, outcome: int, talk: Any) -> None:
        """Check whether the backend sees the client, or this node (kube-proxy.md 5.1)."""
        (where, client), seen = PROBES[index], int(talk.seen_as.address)
        here = is_here(outcome >> 40 & 0xFF)  # the last byte of the address
        may = {
            _is_masqueraded(served, where, client, here)
            for served in self.views.found(where)
            if served
        }
        by_node = seen == number_of(NODE_ADDRESS)
        if by_node not in may or not (by_node or seen == number_of(client.address)):
            how = "as this node" if by_node else "as its client"
            raise Wrong(f"{client.address} to {where} is seen {how} by {spelled(outcome)}")

    def _fill(self, talk: Any, index: int, port: int) -> None:
        (address, number, protocol), client = PROBES[index]
        talk.v6, talk.protocol = version_of(address) == 6, NUMBERS[protocol]
        talk.client.address, talk.client.port = number_of(client.address), htons(port)
        talk.frontend.address, talk.frontend.port = number_of(address), htons(number)
        talk.sent, talk.received = 1000, 900_000


def _is_masqueraded(served: Served, where: Where, client: Asking, here: bool) -> bool:
    if where[0] in CLUSTER_IPS:
        return not client.local
    if served.local_only:
        return False
    return client.local or not here
