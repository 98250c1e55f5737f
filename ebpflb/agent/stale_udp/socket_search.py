# SPDX-License-Identifier: Apache-2.0
"""Find stale UDP sockets: first in the map of sockets, then in their network namespaces; end them.

If the kernel cannot end sockets, their flows are rebound instead.
"""

import logging
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from ebpflb.agent.stale_udp.lookups import (
    Maps,
    ServedFrontends,
    SocketState,
    backend_find,
    is_untranslated,
    socket_range,
)
from ebpflb.errors import NodeError
from ebpflb.kernel.maps.records import EndedSocket, Peer, PeerFrontend, record
from ebpflb.kernel.maps.sockets import RememberedSockets
from ebpflb.kernel.maps.sweep import Gate
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.node import routes
from ebpflb.kernel.node.sock_diag import Connected, SockDiag
from ebpflb.model.addresses import Address, Family, family
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Backend, Frontend, ServiceEntry
from ebpflb.plan.flow_entries import Ends, Entries, Flow, FlowKind, Hook, Tuple, reverse

# Rebind stale flows: where sockets cannot be ended, the packet path rewrites their datagrams.
#
# Two entries are written to the map of flows, from the client through its removed backend to one
# that serves; such a flow is followed, swept and shown like any other. A socket without one, or
# whose flow goes to another removed backend, gets a new one. A flow that has been idle for a while
# is renewed, because the sweeper would remove it although its socket still needs it.
#
# This works for packets that this node routes. A client on the same bridge as its removed backend
# sends to the backend's hardware address, so its socket is left alone; so is a socket for which the
# only other backend is the client itself.

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


log = logging.getLogger(__name__)

_PEER_FRONTEND = record("struct peer_frontend")

EachNamespace = Callable[[Callable[[], SockDiag]], Iterator[tuple[bool, SockDiag]]]
Sockets = dict[Peer, PeerFrontend]
Counts = Counter[Family]

# Runs bpf/hooks/socket_end.c on a struct ended_socket.
EndSocket = Callable[[bytes], int]
_ENDED_SOCKET = record("struct ended_socket")


def remembered(maps: Maps, peer: Peer) -> PeerFrontend | None:
    """Return a datagram socket's data about its peer. bpf/sockets/datagram.h."""
    own = RememberedSockets(maps).get(peer.socket)
    is_own = own and (own.peer.address, own.peer.port) == (peer.address, peer.port)
    if own and is_own and not own.is_shared:
        return own.peer
    found: PeerFrontend | None = maps["peers"].get(peer)
    return found or (own.peer if own and is_own else None)


def stale_sockets(maps: Maps) -> tuple[dict[Peer, PeerFrontend], bool]:
    """Return the stale peers of sockets, and whether there are orphaned ones."""
    states = Answers(maps, ServedFrontends(maps).state_of)
    stale = states.entries(SocketState.STALE)
    return stale, SocketState.ORPHANED in states.known.values()


_Answer = TypeVar("_Answer")


class Answers(Generic[_Answer]):
    """Answers by a socket's data about a peer.

    Many sockets have the same data, which is unpacked and judged only once.
    """

    def __init__(self, maps: Maps, ask: Callable[[PeerFrontend], _Answer]) -> None:
        self._sockets, self._peers, self._ask = RememberedSockets(maps), maps["peers"], ask
        self.known: dict[bytes, _Answer] = {}
        self._unpacked: dict[bytes, PeerFrontend] = {}

    def entries(self, wanted: _Answer) -> dict[Peer, PeerFrontend]:
        """Return all peers of sockets with this answer."""
        own = {
            Peer(int.from_bytes(key, sys.byteorder), entry.address, entry.port): entry
            for key, value in self._sockets.packed_items()
            if (entry := self._wanted(value[: _PEER_FRONTEND.struct.size], wanted))
        }
        further = {
            self._peers.key.unpack(key): entry
            for key, value in self._peers.packed_items()
            if (entry := self._wanted(value, wanted))
        }
        return own | further

    def _wanted(self, packed: bytes, wanted: _Answer) -> PeerFrontend | None:
        """Return the unpacked data if its answer is the wanted one."""
        return self._unpacked[packed] if self._of(packed) == wanted else None

    def _of(self, packed: bytes) -> _Answer:
        answer = self.known.get(packed)
        if answer is None:
            entry = self._unpacked[packed] = _PEER_FRONTEND.unpack(packed)
            answer = self.known[packed] = self._ask(entry)
        return answer


class SocketEnder:
    """``each_namespace`` calls a function in every network namespace (node.namespaces).

    ``can_end``: whether this kernel ends sockets.
    """

    def __init__(
        self, maps: Maps, each_namespace: EachNamespace, end_socket: EndSocket, *, can_end: bool
    ) -> None:
        self.maps, self.each_namespace, self.can_end = maps, each_namespace, can_end
        self.end_socket = end_socket
        self.rebinder = Rebinder(maps)

    def end(self, stale: Sockets) -> tuple[Counts, Sockets]:
        """End these sockets, or rebind their flows.

        Returns how many per family were ended or rebound, and the entries without a connected
        socket. Raises KernelError if sockets cannot be listed.
        """
        done, not_found = Counts(), dict(stale)
        self.rebinder.backends.clear()
        namespaces = self.each_namespace(SockDiag) if stale else iter(())
        for own, diag in namespaces:
            with diag:
                found = _connected(diag, not_found)
                done += (
                    self._end(diag, found, stale)
                    if self.can_end
                    else self._rebind(found, stale, own)
                )
            for peer in found:
                del not_found[peer]
            if not not_found:
                break
        return done, not_found

    def end_untranslated(self) -> Counts:
        """End the node's own sockets that were connected before their frontend was served."""
        if not self.can_end:
            return Counts()
        with SockDiag() as diag:
            ended = [one for one in untranslated(self.maps, diag) if diag.destroy(one)]
        return Counts(family(one.remote[0]) for one in ended)

    def _end(self, diag: SockDiag, found: dict[Peer, Connected], stale: Sockets) -> Counts:
        """End sockets; return how many per family.

        Of two sockets with the same ends the kernel finds only one, until that one is ended. The
        owner of an ended socket may connect it again at once, so a program compares what is
        remembered of the socket and forgets the peer in one run.
        """
        remaining, counts = dict(found), Counts()
        while ended := [peer for peer, one in remaining.items() if diag.destroy(one)]:
            for peer in ended:
                self.end_socket(_ENDED_SOCKET.pack(EndedSocket(peer.socket, stale[peer])))
                counts[family(peer.address)] += 1
                del remaining[peer]
        return counts

    def _rebind(self, found: dict[Peer, Connected], stale: Sockets, own: bool) -> Counts:
        """Rebind flows; the node's ``own`` sockets stay, because no hook rewrites their packets."""
        frontends, counts, unchanged = ServedFrontends(self.maps), Counts(), 0
        for peer, one in found.items():
            flow = StaleFlow(one.local, one.remote)
            rebound = False if own else self.rebinder.rebind(flow, stale[peer].frontend, frontends)
            counts[family(peer.address)] += rebound is True
            unchanged += rebound is False
        if unchanged:
            log.warning(
                "UDP sockets still connected to a removed backend: %d; this kernel cannot end them "
                "(CONFIG_INET_DIAG_DESTROY): restart their clients",
                unchanged,
            )
        return counts


def _connected(diag: SockDiag, stale: Sockets) -> dict[Peer, Connected]:
    """Return the stale sockets that are in this namespace and still have the same peer."""
    ports = {peer.port for peer in stale}
    port = ports.pop() if len(ports) == 1 else 0
    listed = {Peer(one.cookie, *one.remote): one for one in diag.connected(Protocol.UDP, port)}
    return {peer: one for peer, one in listed.items() if peer in stale}


def untranslated(maps: Maps, diag: SockDiag) -> Iterator[Connected]:
    """Yield the node's own sockets that are connected to a frontend itself, though it has backends.

    They were connected before it was served (kube-proxy.md 11.1: flows that were never translated),
    and no hook translates the node's own packets; a pod's packets are translated at its device. A
    hook stores such sockets, except those that were connected before there was a Service: these are
    found by their cluster IP, which is used for nothing else. Sockets that netfilter translates by
    rules of kube-proxy are left alone.
    """
    frontends = ServedFrontends(maps)
    for one in list(diag.connected(Protocol.UDP)):
        found = remembered(maps, Peer(one.cookie, *one.remote))
        if found and not is_untranslated(found):
            continue
        if not found and maps["cluster_ips"].get(one.remote[0]) is None:
            continue
        frontend = found.frontend if found else Frontend(*one.remote, Protocol.UDP)
        if frontends.serves(frontend) and not translated_by_conntrack(one):
            yield one


def translated_by_conntrack(one: Connected) -> bool:
    """Whether conntrack sends the socket's datagrams to another destination."""
    if not conntrack.count():
        return False
    (source, source_port), (destination, destination_port) = one.local, one.remote
    ends = Ends(source, destination, source_port, destination_port)
    try:
        return any(entry.is_translated for entry in conntrack.find([(Protocol.UDP, ends)]))
    except NodeError:  # conntrack cannot be asked
        return False
