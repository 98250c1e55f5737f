# SPDX-License-Identifier: Apache-2.0
"""What the maps say of datagram sockets: who serves what they asked for, and which are stale.

The maps are read while they are used. A service that changes meanwhile is seen as it was or as it
is, for its former block rests (plan.numbers); what is torn counts as served.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.records import Peer, PeerFrontend
from ebpflb.model.addresses import family
from ebpflb.model.services import Protocol
from ebpflb.plan.desired_service import ANY
from ebpflb.plan.entries import Backend, Frontend, Service


class Fate(Enum):
    """How a socket stands that was given a backend."""

    SERVED = auto()
    STALE = auto()  # its backend serves no more, others do
    ORPHANED = auto()  # nobody serves what it asked for


class Serving:
    """Who serves a frontend now, asked of the maps once for each."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self.maps = maps
        self._known: dict[Frontend, tuple[Service, tuple[Backend, ...]] | None] = {}

    def find(self, frontend: Frontend) -> tuple[Service, tuple[Backend, ...]] | None:
        """The service and its block of backends; None where there is no such service."""
        if frontend not in self._known:
            self._known[frontend] = self._read(frontend)
        return self._known[frontend]

    def fate(self, origin: PeerFrontend) -> Fate:
        """Of a socket that asked for and was given what ``origin`` says."""
        if origin.frontend.protocol != Protocol.UDP:
            return Fate.SERVED
        found = self.find(origin.frontend)
        if not (found and found[1]):
            return Fate.ORPHANED
        service, block = found
        if any(backend.service != service.id for backend in block):
            return Fate.SERVED
        serves = any((b.address, b.port) == (origin.address, origin.port) for b in block)
        return Fate.SERVED if serves else Fate.STALE

    def _read(self, frontend: Frontend) -> tuple[Service, tuple[Backend, ...]] | None:
        """As bpf/path/frontend.h: an exact match, or on an address of this node a NodePort."""
        service: Service | None = self.maps["services"].get(frontend)
        if service is None and self._is_here(frontend):
            nodeport = frontend._replace(address=ANY[family(frontend.address)])
            service = self.maps["services"].get(nodeport)
        return service and (service, self._block(service))

    def _is_here(self, frontend: Frontend) -> bool:
        address = frontend.address
        return address.is_loopback or self.maps["node_addresses"].get(address) is not None

    def _block(self, service: Service) -> tuple[Backend, ...]:
        base, size = service.block
        return tuple(self.maps["slots"].get(base + index) for index in range(size))


def stale_sockets(maps: Mapping[str, Map]) -> tuple[dict[Peer, PeerFrontend], bool]:
    """The entries of stale datagram sockets; and whether there are orphaned ones."""
    judge, sockets = _Judge(maps), maps["sockets"]
    stale = {sockets.key.unpack(key): judge.origins[value] for key, value in _pairs(sockets, judge)}
    return stale, Fate.ORPHANED in judge.fates.values()


class _Judge:
    """Many sockets share what they asked for and were given: packed, it is judged once."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._unpack: Callable[[bytes], PeerFrontend] = maps["sockets"].value.unpack
        self._serving = Serving(maps)
        self.fates: dict[bytes, Fate] = {}
        self.origins: dict[bytes, PeerFrontend] = {}

    def __call__(self, packed: bytes) -> Fate:
        fate = self.fates.get(packed)
        if fate is None:
            origin = self.origins[packed] = self._unpack(packed)
            fate = self.fates[packed] = self._serving.fate(origin)
        return fate


def _pairs(sockets: Map, judge: _Judge) -> Iterator[tuple[bytes, bytes]]:
    """Of the stale, packed."""
    key_size, value_size = sockets.spec.key_size, sockets.spec.value_size
    for keys, values in sockets.slices():
        for index in range(len(keys) // key_size):
            value = values[index * value_size : (index + 1) * value_size]
            if judge(value) is Fate.STALE:
                yield keys[index * key_size : (index + 1) * key_size], value
