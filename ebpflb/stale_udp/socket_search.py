# SPDX-License-Identifier: Apache-2.0
"""Which entries in the map of sockets are stale: their backend no longer serves their frontend.

The maps are read while they are written. A service that changes meanwhile is seen as it was or as
it is, for its former slots stay in quarantine; where slots have been given to another service
nevertheless, the socket counts as served.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Generic, TypeVar

from ebpflb.datapath.maps.records import PEER_FRONTEND
from ebpflb.datapath.maps.socket_records import NO_FRONTEND, Peer, PeerFrontend, SocketEntry
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Backend, Frontend, ServiceEntry
from ebpflb.stale_udp.lookups import Maps, policy_admits, service_find, socket_range


class SocketState(Enum):
    """Whether the backend that a socket was given still serves."""

    SERVED = auto()
    STALE = auto()  # other backends serve the frontend, this one does not
    ORPHANED = auto()  # no backend serves the frontend


class ServedFrontends:
    """Services and their backends by frontend; each is read from the maps only once."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps
        self._known: dict[Frontend, tuple[ServiceEntry, tuple[Backend, ...]] | None] = {}

    def find(self, frontend: Frontend) -> tuple[ServiceEntry, tuple[Backend, ...]] | None:
        """The service and the backends in its slots; None where there is no such service."""
        if frontend not in self._known:
            service = service_find(self.maps, frontend)
            self._known[frontend] = service and (service, self._backends(service))
        return self._known[frontend]

    def serves(self, frontend: Frontend) -> bool:
        """Whether a socket of the node that connects to it now is given a backend."""
        service = service_find(self.maps, frontend)
        if service is None or not socket_range(service).size:
            return False
        return "restricted" not in service.flags or policy_admits(self.maps, service, frontend)

    def state_of(self, entry: PeerFrontend) -> SocketState:
        """The state of sockets that asked for this frontend and were given this backend."""
        if entry.frontend.protocol != Protocol.UDP or is_untranslated(entry):
            return SocketState.SERVED
        found = self.find(entry.frontend)
        if not (found and found[1]):
            return SocketState.ORPHANED
        service, backends = found
        if any(backend.service != service.id for backend in backends):
            return SocketState.SERVED
        serves = any((b.address, b.port) == (entry.address, entry.port) for b in backends)
        return SocketState.SERVED if serves else SocketState.STALE

    def _backends(self, service: ServiceEntry) -> tuple[Backend, ...]:
        base, size = service.block
        return tuple(self.maps["slots"].get(base + index) for index in range(size))


def is_untranslated(entry: PeerFrontend) -> bool:
    """Whether the socket was connected without a backend, because nobody served (path/socket.h)."""
    return entry.backend == 0


def remembered(maps: Maps, peer: Peer) -> PeerFrontend | None:
    """What a datagram socket remembers of its peer. bpf/sockets/datagram.h."""
    own: SocketEntry | None = maps["sockets"].get(peer.socket)
    is_own = own and (own.peer.address, own.peer.port) == (peer.address, peer.port)
    if own and is_own and not own.is_shared:
        return own.peer
    found: PeerFrontend | None = maps["peers"].get(peer)
    return found or (own.peer if own and is_own else None)


def forget_peer(maps: Maps, peer: Peer) -> None:
    """The socket no longer talks to this peer. Its own entry stays without a frontend until the
    release, which counts that the connection is closed.
    """
    maps["peers"].delete([peer])
    own: SocketEntry | None = maps["sockets"].get(peer.socket)
    if own and (own.peer.address, own.peer.port) == (peer.address, peer.port):
        ended = own.peer._replace(frontend=NO_FRONTEND)
        maps["sockets"].replace(peer.socket, own._replace(peer=ended, is_shared=0))


def stale_sockets(maps: Maps) -> tuple[dict[Peer, PeerFrontend], bool]:
    """The stale peers of sockets, and whether there are orphaned ones."""
    states = Answers(maps, ServedFrontends(maps).state_of)
    stale = states.entries(SocketState.STALE)
    return stale, SocketState.ORPHANED in states.known.values()


_Answer = TypeVar("_Answer")


class Answers(Generic[_Answer]):
    """Answers by what sockets remember of a peer: many remember the same, which is unpacked and
    asked about only once.
    """

    def __init__(self, maps: Maps, ask: Callable[[PeerFrontend], _Answer]) -> None:
        self._sockets, self._peers, self._ask = maps["sockets"], maps["peers"], ask
        self.known: dict[bytes, _Answer] = {}
        self._unpacked: dict[bytes, PeerFrontend] = {}

    def entries(self, wanted: _Answer) -> dict[Peer, PeerFrontend]:
        """All peers of sockets whose answer is this one."""
        own = {
            Peer(self._sockets.key.unpack(key), entry.address, entry.port): entry
            for key, value in self._sockets.packed_items()
            if (entry := self._wanted(value[: PEER_FRONTEND.struct.size], wanted))
        }
        further = {
            self._peers.key.unpack(key): entry
            for key, value in self._peers.packed_items()
            if (entry := self._wanted(value, wanted))
        }
        return own | further

    def _wanted(self, packed: bytes, wanted: _Answer) -> PeerFrontend | None:
        """What the bytes say, if that is the answer."""
        return self._unpacked[packed] if self._of(packed) == wanted else None

    def _of(self, packed: bytes) -> _Answer:
        answer = self.known.get(packed)
        if answer is None:
            entry = self._unpacked[packed] = PEER_FRONTEND.unpack(packed)
            answer = self.known[packed] = self._ask(entry)
        return answer
