# SPDX-License-Identifier: Apache-2.0
"""Which UDP flows a plan makes stale (kube-proxy.md 11.1), and where those may go that must move.

A backend stops serving when it leaves its service's block. Its flows move only where another
serves the service; those of a service that nobody serves, or that is deleted, stay as they are
until it is served again. TCP and SCTP keep what they have.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.entries import Backend, Flags, Service
from ebpflb.plan.flow_entries import Entries, Flow, FlowKind, Hook, Tuple
from ebpflb.plan.service_entries import ServiceEntries

_REQUEST, _REPLY = frozenset({"request", "seen"}), frozenset({"seen"})


class Stale(NamedTuple):
    """Ids of UDP backends that serve no more: ``ended`` where others do, ``orphaned`` where none.

    ``revived``: a UDP service port is served that was not before.
    """

    ended: frozenset[int] = frozenset()
    orphaned: frozenset[int] = frozenset()
    revived: bool = False

    def __bool__(self) -> bool:
        return any(self)

    def __or__(self, other: "Stale") -> "Stale":
        ended, orphaned = self.ended | other.ended, self.orphaned | other.orphaned
        return Stale(ended, orphaned, self.revived or other.revived)


class StaleWatch:
    """Gathers what the planner turns service ports into, until somebody takes it."""

    def __init__(self) -> None:
        self.stale = Stale()

    def turned(self, name: PortName, old: ServiceEntries, new: ServiceEntries) -> None:
        """A service port is to be programmed otherwise; NO_ENTRIES before and after its time."""
        if name.protocol != Protocol.UDP:
            return
        gone = frozenset(old.ids).difference(new.ids)
        ended, orphaned, revived = self.stale
        if new.ids:
            self.stale = Stale(ended | gone, orphaned, revived or not old.ids)
        elif gone:
            self.stale = Stale(ended, orphaned | gone, revived)

    def take(self) -> Stale:
        """All since it was last taken; call it when the plans are carried out."""
        taken, self.stale = self.stale, Stale()
        return taken


def heirs(
    service: Service, block: Sequence[Backend], client: tuple[Address, int]
) -> Iterator[Backend]:
    """The backends that a stale flow of this client's address and port may go to, best first.

    They are those that its socket would be given (bpf/path/policy.h: of a socket the policy Local
    confines cluster IPs alone); under session affinity a client's flows stay together. The client
    itself is none: a flow to itself would need the masquerade that sockets go without.
    """
    confined = "local" in service.flags and "external" not in service.flags
    chosen = service.local if confined else service.cluster
    first = chosen.base - service.block.base
    allowed = block[first : first + chosen.size]
    address, port = client
    asker = address.packed + (b"" if service.affinity_seconds else port.to_bytes(2, "big"))
    turn = zlib.crc32(asker) % len(allowed) if allowed else 0
    return (heir for heir in (*allowed[turn:], *allowed[:turn]) if heir.address != address)


class Stranded(NamedTuple):
    """A pod's connected socket and the former backend that it talks to."""

    client: tuple[Address, int]
    backend: tuple[Address, int]

    @property
    def asked(self) -> Tuple:
        """Its datagrams as they come in."""
        ends = self.client[0], self.backend[0], self.client[1], self.backend[1]
        return Tuple(*ends, Protocol.UDP, Hook.INGRESS)

    def answered(self, address: Address, port: int) -> Tuple:
        """The answers of whoever is at this address and port as they go out."""
        ends = address, self.client[0], port, self.client[1]
        return Tuple(*ends, Protocol.UDP, Hook.EGRESS)

    def entries(self, heir: Backend, now: int) -> Entries:
        """Its flow to another backend, which answers as the former one: the way back first."""
        way_back = self.answered(heir.address, heir.port)
        return {
            way_back: self._flow(*self.backend, heir, FlowKind.UN_DNAT, _REPLY, now),
            self.asked: self._flow(heir.address, heir.port, heir, FlowKind.DNAT, _REQUEST, now),
        }

    def _flow(
        self, address: Address, port: int, heir: Backend, kind: FlowKind, flags: Flags, now: int
    ) -> Flow:
        client_port = self.client[1]
        return Flow(now, now, address, port, client_port, heir.service, heir.id, kind, flags)
