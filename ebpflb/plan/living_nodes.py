# SPDX-License-Identifier: Apache-2.0
"""Tell which nodes of the segment live, from what is heard of them. Pure.

Each agent sends a beacon several times a second. A node whose beacons stop is asked for its own
address, which its kernel answers: so a node without an agent, or one that is too busy for its agent
to run, is not taken for dead. It is *idle*: it keeps the addresses that it answers for, and gets no
others. All times are in seconds, by one monotonic clock.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

BEACON_INTERVAL = 0.15
ASKED_AFTER = 0.4  # without a beacon the node is asked for its address
ASKED_AGAIN = 1.0  # that is without any sign for SILENT_FOR_LONG
SILENT_FOR_LONG = 5.0
DEAD_AFTER = 0.75  # without a beacon or an answer
SETTLED_AFTER = 1.5  # from the start, until everyone who lives has been heard
LATE = 0.3  # between two turns beyond the interval: then what was missed says nothing


class Beacon(NamedTuple):
    """What an agent says of itself.

    ``able``: it has heard the others long enough to take addresses. ``cluster`` and ``pools`` are
    digests: agents of another cluster do not count, and those with other pools own other addresses.
    """

    node: str
    able: bool
    cluster: bytes
    pools: bytes


class Heard(NamedTuple):
    """The living nodes, except this one: those with an agent and the same pools, and the others.

    ``agents``: any agent of this cluster was heard; ``mixed``: one of them has other pools.
    """

    fresh: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    agents: bool = False
    mixed: bool = False

    @property
    def all(self) -> frozenset[str]:
        return self.fresh | self.idle


class LivingNodes:
    """The nodes of this cluster that were heard; ``cluster`` and ``pools`` are this node's own."""

    def __init__(self, node: str, pools: bytes) -> None:
        self._node, self._pools = node, pools
        self._beacons: dict[str, tuple[float, Beacon]] = {}
        self._answers: dict[str, float] = {}
        self._asked_all = -math.inf
        self.macs: dict[bytes, str] = {}  # the node that has it

    def heard(self, beacon: Beacon, mac: bytes, now: float) -> None:
        if beacon.node != self._node:
            self._beacons[beacon.node] = now, beacon
            self.macs[mac] = beacon.node

    def answered(self, node: str, mac: bytes, now: float) -> None:
        """Note that the node's kernel has answered for the node's own address."""
        self._answers[node] = now
        self.macs[mac] = node

    def forget_others(self, known: frozenset[str]) -> None:
        """Forget the nodes that are not known any more."""
        self._beacons = {node: it for node, it in self._beacons.items() if node in known}
        self._answers = {node: at for node, at in self._answers.items() if node in known}
        self.macs = {mac: node for mac, node in self.macs.items() if node in known}

    def excuse(self, seconds: float) -> None:
        """Count no silence in the last ``seconds``, in which this agent did not run."""
        self._beacons = {node: (at + seconds, it) for node, (at, it) in self._beacons.items()}
        self._answers = {node: at + seconds for node, at in self._answers.items()}

    def asked(self, known: Iterable[str], now: float) -> list[str]:
        """Return the nodes to ask for their address now: those whose beacons are missing.

        A node that has been silent for long is asked now and then.
        """
        silent = [node for node in known if now - self._beacon(node) >= ASKED_AFTER]
        is_time = now - self._asked_all >= ASKED_AGAIN
        if is_time:
            self._asked_all = now
        return [
            node
            for node in silent
            if node != self._node and (is_time or now - self._sign(node) < SILENT_FOR_LONG)
        ]

    def _beacon(self, node: str) -> float:
        return self._beacons[node][0] if node in self._beacons else -math.inf

    def _sign(self, node: str) -> float:
        """Return when the node last gave a sign of life."""
        return max(self._beacon(node), self._answers.get(node, -math.inf))

    def living(self, now: float) -> Heard:
        fresh, idle, agents, mixed = set[str](), set[str](), False, False
        for node in self._beacons.keys() | self._answers.keys():
            if now - self._beacon(node) < DEAD_AFTER:
                beacon = self._beacons[node][1]
                is_alike = beacon.pools == self._pools
                agents, mixed = True, mixed or not is_alike
                (fresh if is_alike and beacon.able else idle).add(node)
            elif now - self._sign(node) < DEAD_AFTER:
                idle.add(node)
        return Heard(frozenset(fresh), frozenset(idle), agents, mixed)
