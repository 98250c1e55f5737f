# SPDX-License-Identifier: Apache-2.0
"""Rebind stale flows: where sockets cannot be ended, the packet path rewrites their datagrams.

Two entries are written to the map of flows, from the client through its removed backend to one
that serves; such a flow is followed, swept and shown like any other. A socket without one, or
whose flow goes to another removed backend, gets a new one. A flow that has been idle for a while
is renewed, because the sweeper would remove it although its socket still needs it.

This works for packets that this node routes. A client on the same bridge as its removed backend
sends to the backend's hardware address, so its socket is left alone; so is a socket for which the
only other backend is the client itself.
"""

import time
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebpflb.agent.stale_udp.lookups import Maps, ServedFrontends, backend_find, socket_range
from ebpflb.kernel.maps.sweep import Gate
from ebpflb.kernel.node import routes
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Backend, Frontend, ServiceEntry
from ebpflb.plan.flow_entries import Entries, Flow, FlowKind, Hook, Tuple, reverse

RENEWAL = 60.0  # seconds; a UDP flow that was used in both directions is swept after 180

_REQUEST, _REPLY = frozenset({"request", "seen"}), frozenset({"seen"})


class StaleFlow(NamedTuple):
    """A pod's connected socket and its removed backend."""

    client: tuple[Address, int]
    backend: tuple[Address, int]

    @property
    def request(self) -> Tuple:
        """The socket's datagrams at ingress."""
        ends = self.client[0], self.backend[0], self.client[1], self.backend[1]
        return Tuple(*ends, Protocol.UDP, Hook.INGRESS)

    def reply(self, address: Address, port: int) -> Tuple:
        """Return the replies of the backend at this address and port, at egress."""
        ends = address, self.client[0], port, self.client[1]
        return Tuple(*ends, Protocol.UDP, Hook.EGRESS)

    def entries(self, backend: Backend, now: int) -> Entries:
        """Return the flow to another backend, whose replies seem to come from the removed one.

        The reply's entry comes first.
        """
        (former, former_port), (_, client_port) = self.backend, self.client
        ids = client_port, backend.service, backend.id, 0
        reply = Flow(now, 0, former, former_port, *ids, FlowKind.UN_DNAT, _REPLY, last_seen=now)
        request = reply._replace(
            address=backend.address, port=backend.port, kind=FlowKind.DNAT, flags=_REQUEST
        )
        return {self.reply(backend.address, backend.port): reply, self.request: request}


class Rebinder:
    """Rebinds flows; ``backends`` are the ids of their current backends."""

    def __init__(self, maps: Maps) -> None:
        self.maps, self.flows = maps, maps["other_flows"]
        self.backends: set[int] = set()

    def rebind(
        self, stale: StaleFlow, frontend: Frontend, frontends: ServedFrontends
    ) -> bool | None:
        """Whether the flow was rebound to another backend of the frontend.

        None if it already was.
        """
        now, flow = time.monotonic_ns(), self.flows.get(stale.request)
        if flow and backend_find(self.maps, flow.service, flow.backend):
            self.backends.add(flow.backend)
            self._renew(stale, flow, now)
            return None
        if flow:
            self.flows.delete([stale.reply(flow.address, flow.port), stale.request])
        found = frontends.find(frontend)
        if found is None or are_neighbours(stale.client[0], stale.backend[0]):
            return False
        candidates = replacements(*found, stale.client)
        return any(self._write(stale, backend, now) for backend in candidates)

    def _write(self, stale: StaleFlow, backend: Backend, now: int) -> bool:
        """Write the flow.

        Return False if another flow of this client's port has the same replies.
        """
        (reply_key, reply), (request_key, request) = stale.entries(backend, now).items()
        Gate(self.maps).open()
        if not self.flows.insert(reply_key, reply):
            return False
        self.flows.delete([reverse(reply_key)])  # the masquerade of a former flow
        self.flows.write([(request_key, request)])
        self.backends.add(backend.id)
        return True

    def _renew(self, stale: StaleFlow, flow: Flow, now: int) -> None:
        if now - flow.last_seen < RENEWAL * 1e9:
            return
        reply_key = stale.reply(flow.address, flow.port)
        reply = self.flows.get(reply_key) or flow._replace(
            address=stale.backend[0], port=stale.backend[1], kind=FlowKind.UN_DNAT, flags=_REPLY
        )
        renewed = ((reply_key, reply), (stale.request, flow))
        self.flows.write([(key, entry._replace(last_seen=now)) for key, entry in renewed])


def replacements(
    service: ServiceEntry, backends: Sequence[Backend], client: tuple[Address, int]
) -> Iterator[Backend]:
    """Yield the backends to which a stale flow of this client may go, best first.

    They are those that a socket of the client could get; ``backends`` are all in the service's
    slots. Under session affinity all flows of a client go to the same backend. The client itself is
    left out: a flow to itself would need a masquerade, which sockets do not have.
    """
    slots = socket_range(service)
    first = slots.base - service.block.base
    allowed = backends[first : first + slots.size]
    address, port = client
    affine = address.packed + (b"" if service.affinity_seconds else port.to_bytes(2, "big"))
    start = zlib.crc32(affine) % len(allowed) if allowed else 0
    candidates = (*allowed[start:], *allowed[:start])
    return (backend for backend in candidates if backend.address != address)


def are_neighbours(one: Address, other: Address) -> bool:
    """Whether this node reaches both by the same device: their packets may bypass the node."""
    devices = {routes.route_to(one).ifindex, routes.route_to(other).ifindex}
    return len(devices) == 1 and 0 not in devices
