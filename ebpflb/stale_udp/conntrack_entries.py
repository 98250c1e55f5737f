# SPDX-License-Identifier: Apache-2.0
"""Stale UDP flows in conntrack: their entries are deleted (kube-proxy.md 11.1).

An entry is stale if its original destination is a frontend that somebody serves and its reply comes
from somewhere else than a serving backend, address and port: from one that was removed, or from the
frontend itself, if it was made when nobody served. The client's next datagram opens a new flow.
Entries of a kube-proxy that served before count as well.
"""

from collections import Counter
from collections.abc import Iterator

from ebpflb.datapath.maps.frontend_keys import FrontendKeys
from ebpflb.errors import NodeError
from ebpflb.model.addresses import Address, Family, family
from ebpflb.model.services import Protocol
from ebpflb.node import ctnetlink
from ebpflb.plan.connections import Connection
from ebpflb.plan.entries import Frontend
from ebpflb.stale_udp.lookups import Maps
from ebpflb.stale_udp.socket_search import ServedFrontends


class StaleConnections:
    """Of the network namespace of the thread that calls."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps

    def delete(self) -> Counter[Family]:
        """How many were deleted of each family. Raises OSError if conntrack cannot be read."""
        try:
            stale = list(self._stale())
            ctnetlink.delete(stale)
        except NodeError as error:
            raise OSError(str(error)) from error
        return Counter(family(entry.original.source) for entry in stale)

    def _stale(self) -> Iterator[Connection]:
        serving = _Serving(self.maps)
        for entry in ctnetlink.connections(FrontendKeys(self.maps), Protocol.UDP):
            _, destination, _, port = entry.original
            backends = serving.at(Frontend(destination, port, Protocol.UDP))
            if backends and (entry.reply.source, entry.reply.source_port) not in backends:
                yield entry


class _Serving:
    """The backends of each frontend, read from the maps only once."""

    def __init__(self, maps: Maps) -> None:
        self._frontends = ServedFrontends(maps)
        self._known: dict[Frontend, set[tuple[Address, int]]] = {}

    def at(self, frontend: Frontend) -> set[tuple[Address, int]]:
        """Empty where nobody serves it, or where it changes just now: another search follows."""
        if frontend not in self._known:
            service, backends = self._frontends.find(frontend) or (None, ())
            whole = service and all(each.service == service.id for each in backends)
            self._known[frontend] = {(b.address, b.port) for b in backends} if whole else set()
        return self._known[frontend]
