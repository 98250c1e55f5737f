# SPDX-License-Identifier: Apache-2.0
"""Which connections are meant: by the frontend that the client asked for, and the backend."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

from ebpflb.model.addresses import family
from ebpflb.model.services import PortName
from ebpflb.plan.desired_service import ANY
from ebpflb.plan.entries import Frontend
from ebpflb.plan.removed_endpoints import Gone
from ebpflb.plan.watched_ports import Endpoint
from ebpflb.stale_udp.lookups import Maps, node_serves
from ebpflb.stale_udp.socket_search import ServedFrontends

ResetCounts = Counter[tuple[Frontend, Endpoint]]


class WantedConnections(Protocol):
    """Which connections are searched."""

    @property
    def ports(self) -> frozenset[int]:
        """Those of the frontends: all others need no closer look."""

    def has(self, frontend: Frontend, endpoint: Endpoint) -> bool:
        """Whether a connection through this frontend to this backend is one of them."""


class ConnectionKind(Protocol):
    """The connections of one kind, by ``kind``'s name."""

    kind: str

    def found(self, wanted: WantedConnections) -> Iterable[tuple[Frontend, Endpoint]]:
        """Through which frontends there are connections to which backends; each pair once."""

    def reset(self, wanted: WantedConnections, *, is_last: bool) -> ResetCounts:
        """How many were reset for the first time. ``is_last``: of the passes."""


class FrontendNames:
    """The service ports that watch these frontends; a NodePort's address is unspecified."""

    def __init__(self, maps: Maps, frontends: Iterable[tuple[Frontend, PortName]]) -> None:
        self._maps = maps
        self._names: dict[Frontend, list[PortName]] = defaultdict(list)
        for frontend, name in frontends:
            self._names[frontend].append(name)

    @property
    def ports(self) -> frozenset[int]:
        return frozenset(frontend.port for frontend in self._names)

    def has(self, frontend: Frontend, _endpoint: Endpoint) -> bool:
        """Whatever the backend is."""
        return bool(self.of(frontend))

    def of(self, frontend: Frontend) -> list[PortName]:
        """Those that a client reaches at this address, as it has asked for it."""
        if frontend in self._names:
            return self._names[frontend]
        nodeport = frontend._replace(address=ANY[family(frontend.address)])
        if nodeport not in self._names or not node_serves(self._maps, frontend.address):
            return []
        is_another = self._maps["services"].get(frontend) is not None
        return [] if is_another else self._names[nodeport]


class GoneConnections:
    """Those to endpoints that have gone, unless another Service has the frontend by now, and the
    same endpoint.
    """

    def __init__(self, maps: Maps, gone: Iterable[Gone]) -> None:
        self._gone = {(each.service, each.endpoint): each for each in gone}
        pairs = [(f, each.service) for each in self._gone.values() for f in each.frontends]
        self._names = FrontendNames(maps, pairs)
        self._served = ServedFrontends(maps)
        self._known: dict[tuple[Frontend, Endpoint], Gone | None] = {}

    @property
    def ports(self) -> frozenset[int]:
        return self._names.ports

    def has(self, frontend: Frontend, endpoint: Endpoint) -> bool:
        return self.of(frontend, endpoint) is not None

    def of(self, frontend: Frontend, endpoint: Endpoint) -> Gone | None:
        """What has gone, if a connection through this frontend to this backend is meant."""
        at = frontend, endpoint
        if at not in self._known:
            self._known[at] = next(self._find(frontend, endpoint), None)
        return self._known[at]

    def _find(self, frontend: Frontend, endpoint: Endpoint) -> Iterator[Gone]:
        for name in self._names.of(frontend):
            gone = self._gone.get((name, endpoint))
            if gone and not self._is_served(frontend, endpoint):
                yield gone

    def _is_served(self, frontend: Frontend, endpoint: Endpoint) -> bool:
        _, backends = self._served.find(frontend) or (None, ())
        return any((each.address, each.port) == endpoint for each in backends)
