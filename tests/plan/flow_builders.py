# SPDX-License-Identifier: Apache-2.0
"""Flows as the packet path writes them."""

from collections.abc import Iterable
from ipaddress import ip_address
from typing import NamedTuple

from ebpflb.entries.flows import Entries, Flow, FlowKind, Hook, Tuple
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol

REQUEST, MASQUERADE, ANSWER, REPLY = range(4)  # the entries of a flow, in this order
SECOND = 1_000_000_000
NOW = 10**6 * SECOND

CLIENT, NODE, BACKEND = map(ip_address, ("198.51.100.7", "192.0.2.1", "10.244.1.11"))

Place = tuple[Address, int]  # an address and a port


class Made(NamedTuple):
    """One flow; its ports distinguish it from others."""

    number: int
    protocol: Protocol = Protocol.TCP
    masqueraded: bool = False
    chosen: bool = True  # egress has chosen the masquerade
    changed: bool = False  # the client's port was in use

    def entries(self, flags: Iterable[str], idle: Iterable[int]) -> Entries:
        """Return four entries with these words and seconds since their last use."""
        client = (CLIENT, 1000) if self.changed else (CLIENT, 3000 + self.number)
        frontend = (ip_address("10.96.0.0") + self.number, 80)
        inside = (CLIENT, 2000 + self.number) if self.changed else client
        backend, masquerade = (BACKEND, 8080), (NODE, 61_000 + self.number)
        snat = FlowKind.SNAT if self.chosen else FlowKind.SNAT_PENDING
        to_node = masquerade if self.chosen else (NODE, 0)
        ingress, egress = Hook.INGRESS, Hook.EGRESS
        every: list[tuple[Tuple, Place, int, FlowKind]] = [
            (self._key(client, frontend, ingress), backend, inside[1], FlowKind.DNAT),
            (self._key(inside, backend, egress), to_node, backend[1], snat),
            (self._key(backend, masquerade, ingress), inside, backend[1], FlowKind.UN_SNAT),
            (self._key(backend, inside, egress), frontend, client[1], FlowKind.UN_DNAT),
        ]
        rows = zip(every, flags, idle, strict=True)
        found = [
            (key, self._flow(to, port, kind, words, ago))
            for (key, to, port, kind), words, ago in rows
        ]
        keep = {REQUEST, REPLY} | ({MASQUERADE} if self.masqueraded else set())
        keep |= {ANSWER} if self.masqueraded and self.chosen else set()
        return {key: flow for part, (key, flow) in enumerate(found) if part in keep}

    def plain(self, ago: int = 0) -> Entries:
        """Return entries of a flow that both sides have used, this number of seconds ago."""
        words = "request masquerade" if self.masqueraded else "request"
        return self.entries([f"{words} seen"] * 2 + ["seen"] * 2, [ago] * 4)

    def _key(self, source: Place, destination: Place, hook: Hook) -> Tuple:
        return Tuple(source[0], destination[0], source[1], destination[1], self.protocol, int(hook))

    def _flow(self, to: Place, other_port: int, kind: FlowKind, words: str, ago: int) -> Flow:
        used = NOW - ago * SECOND
        flags = frozenset(words.split())
        address, port = to
        begun = used - SECOND
        return Flow(begun, 0, address, port, other_port, 7, 21, 0, kind, flags, last_seen=used)
