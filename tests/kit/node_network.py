# SPDX-License-Identifier: Apache-2.0
"""Agents that judge nodes (model/node_health.py), and a network that loses packets; virtual time.

An agent takes what has come when its turn comes, as the thread does (agent/node_watch.py).
"""

import random
from collections import Counter, deque
from ipaddress import IPv4Address
from typing import NamedTuple

from ebpflb.agent.node_watch import MOST_SENT
from ebpflb.model.node_health import TURN_SECONDS, NodeHealth
from ebpflb.model.node_messages import SIZE, Message

ECHO_BYTES, MAIL_BYTES = 20 + 20, 20 + 8 + SIZE  # with the header of IPv4
SYN_BYTES = 20 + 40
BUFFERED = 256  # datagrams that wait for an agent


class Answer(NamedTuple):
    """Of a node's kernel, to an echo request or a SYN."""

    at: float
    text: str
    token: int
    is_ping: bool


class Mail(NamedTuple):
    """A datagram of an agent."""

    at: float
    text: str
    message: Message


class Alarm(NamedTuple):
    """One node holds another for silent."""

    at: float
    who: str
    about: str


class Node:
    """A node with its agent. ``loss``: of packets on its link; ``side``: of a partition.

    ``sent`` are its packets by kind, its kernel's replies too. ``drops``: kinds that its firewall
    drops.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.name, self.address = f"node-{number}", IPv4Address(0x0A000001 + number)
        self.text = str(self.address)
        self.health = NodeHealth(self.name, random.Random(seed))
        self.is_up, self.is_paused = True, False
        self.side, self.loss, self.delay = 0, 0.0, 0.0005
        self.drops: frozenset[str] = frozenset()
        self.inbox: deque[Answer | Mail] = deque()
        self.sent: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        probes = self.sent["echo"] * ECHO_BYTES + self.sent["syn"] * SYN_BYTES
        return probes + self.sent["mail"] * MAIL_BYTES

    @property
    def silent(self) -> frozenset[str]:
        return self.health.silent.nodes


class Network:
    """``now`` is in seconds; ``alarms`` are all since the start; ``broken``: pairs of nodes."""

    def __init__(self, count: int, seed: int = 1) -> None:
        self.rng, self.now = random.Random(seed), 1000.0
        self.nodes = [Node(number, seed * count + number) for number in range(count)]
        self.alarms: list[Alarm] = []
        self.broken: set[frozenset[Node]] = set()
        self._at = {each.text: each for each in self.nodes}
        self._silent: dict[str, frozenset[str]] = {}
        for each in self.nodes:
            self.list(each)

    def list(self, node: Node, without: frozenset[str] = frozenset()) -> None:
        """The node's agent learns of all nodes, without some."""
        nodes = {each.name: each.address for each in self.nodes if each.name not in without}
        node.health.set_nodes(nodes, self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            for node in self.nodes:
                if node.is_up and not node.is_paused:
                    self._turn(node)
            self.now += TURN_SECONDS

    def _turn(self, node: Node) -> None:
        self._take(node)
        health = node.health
        health.turn(self.now)
        for kind, probes in (("echo", health.echoes), ("syn", health.syns)):
            for text, token in probes:
                self._probe(node, kind, text, token)
            probes.clear()
        for whom, message in health.messages:
            everyone = [it.text for it in health.members if it.about != message.about]
            self.rng.shuffle(everyone)
            for place, text in enumerate([whom] if whom else everyone):
                self._mail(node, text, message, TURN_SECONDS * (place // MOST_SENT))
        health.messages.clear()
        if node.silent != self._silent.get(node.name, frozenset()):
            new = node.silent - self._silent.get(node.name, frozenset())
            self.alarms += [Alarm(self.now, node.name, each) for each in new]
            self._silent[node.name] = node.silent

    def _take(self, node: Node) -> None:
        for _ in range(len(node.inbox)):
            each = node.inbox.popleft()
            if each.at > self.now:
                node.inbox.append(each)
            elif isinstance(each, Answer):
                node.health.answered(each.text, each.token, self.now, is_ping=each.is_ping)
            else:
                node.health.told(each.text, each.message, self.now)

    def _is_lost(self, one: Node, other: Node) -> bool:
        if not other.is_up or one.side != other.side or frozenset({one, other}) in self.broken:
            return True
        return any(each.loss and self.rng.random() < each.loss for each in (one, other))

    def _probe(self, node: Node, kind: str, text: str, token: int) -> None:
        node.sent[kind] += 1
        other = self._at[text]
        if self._is_lost(node, other) or kind in other.drops:
            return
        other.sent[kind] += 1
        if not self._is_lost(other, node):
            at = self.now + 2 * (node.delay + other.delay)
            node.inbox.append(Answer(at, text, token, is_ping=kind == "echo"))

    def _mail(self, node: Node, text: str, message: Message, later: float) -> None:
        node.sent["mail"] += 1
        other = self._at[text]
        if not self._is_lost(node, other) and len(other.inbox) < BUFFERED:
            at = self.now + later + node.delay + other.delay
            other.inbox.append(Mail(at, node.text, message))
