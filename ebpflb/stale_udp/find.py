# SPDX-License-Identifier: Apache-2.0
"""Which entries in the map of sockets are stale: their backend no longer serves their frontend.

The maps are read while they are written. A service that changes meanwhile is seen as it was or as
it is, for its former slots stay in quarantine; where slots have been given to another service
nevertheless, the socket counts as served.
"""

from collections.abc import Callable
from enum import Enum, auto

from ebpflb.datapath.maps.records import Peer, PeerFrontend
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


def stale_sockets(maps: Maps) -> tuple[dict[Peer, PeerFrontend], bool]:
    """The stale entries of the map of sockets, and whether there are orphaned ones."""
    states, sockets = _States(maps), maps["sockets"]
    stale = {
        sockets.key.unpack(key): states.entries[value]
        for key, value in sockets.packed_items()
        if states.of(value) is SocketState.STALE
    }
    return stale, SocketState.ORPHANED in states.known.values()


class _States:
    """States by packed value: many sockets have the same one, which is unpacked only once."""

    def __init__(self, maps: Maps) -> None:
        self._unpack: Callable[[bytes], PeerFrontend] = maps["sockets"].value.unpack
        self._frontends = ServedFrontends(maps)
        self.known: dict[bytes, SocketState] = {}
        self.entries: dict[bytes, PeerFrontend] = {}

    def of(self, packed: bytes) -> SocketState:
        state = self.known.get(packed)
        if state is None:
            entry = self.entries[packed] = self._unpack(packed)
            state = self.known[packed] = self._frontends.state_of(entry)
        return state
