# SPDX-License-Identifier: Apache-2.0
"""Stale UDP flows in conntrack: their entries are deleted (kube-proxy.md 11.1).

An entry is stale if its original destination is a frontend that has backends and its reply comes
from another address or port than theirs: from a backend that was removed, or from the frontend
itself, if the entry was made when the frontend had no backends. The client's next datagram opens a
new flow. Entries of a kube-proxy that served before count as well.
"""

from collections.abc import Iterable

from ebpflb.datapath.maps.frontend_keys import FrontendKeys
from ebpflb.model.addresses import Address, family
from ebpflb.model.services import Protocol
from ebpflb.node import ctnetlink
from ebpflb.plan.connections import SEEN_REPLY, Connection, StaleCandidates
from ebpflb.plan.entries import Frontend
from ebpflb.stale_udp.end import Counts
from ebpflb.stale_udp.lookups import Maps
from ebpflb.stale_udp.socket_search import ServedFrontends


class StaleConnections:
    """Of the network namespace of the thread that calls."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps

    def delete(self, candidates: StaleCandidates) -> Counts:
        """Delete those of the candidates that are stale; return how many of each family.

        The kernel searches its whole table. Raises NodeError.
        """
        (frontend, backend), serving = candidates, _Serving(self.maps)
        backends = serving.at(frontend)
        if not backends or backend in backends:
            return Counts()
        count = ctnetlink.delete_answered(frontend, backend) if backend else None
        if count is not None:
            return Counts({family(frontend.address): count})
        return self._delete(ctnetlink.connections_to(frontend), serving)

    def delete_all(self) -> Counts:
        """Delete all stale entries, and those of TCP that were made while nothing translated.

        Otherwise as ``delete``. All entries of UDP and TCP are read.
        """
        keys = FrontendKeys(self.maps)
        opening = ctnetlink.connections(keys, Protocol.TCP)
        ctnetlink.delete([each for each in opening if _is_untranslated_opening(each)])
        return self._delete(ctnetlink.connections(keys, Protocol.UDP), _Serving(self.maps))

    def _delete(self, listed: Iterable[Connection], serving: "_Serving") -> Counts:
        stale = [entry for entry in listed if serving.lacks_backend_of(entry)]
        ctnetlink.delete(stale)
        return Counts(family(entry.original.source) for entry in stale)


def _is_untranslated_opening(entry: Connection) -> bool:
    """Its client sends its SYN again, which is then translated; with the entry it would not be.

    The SYN came before a device had programs, or while the table of nftables was missing.
    """
    is_tcp = entry.protocol == Protocol.TCP
    return is_tcp and not entry.is_translated and not entry.status & SEEN_REPLY


class _Serving:
    """The backends of each frontend, read from the maps only once."""

    def __init__(self, maps: Maps) -> None:
        self._frontends = ServedFrontends(maps)
        self._known: dict[Frontend, set[tuple[Address, int]]] = {}

    def at(self, frontend: Frontend) -> set[tuple[Address, int]]:
        """Empty where the frontend has none, or where it changes just now: a search follows."""
        if frontend not in self._known:
            service, backends = self._frontends.find(frontend) or (None, ())
            whole = service and all(each.service == service.id for each in backends)
            self._known[frontend] = {(b.address, b.port) for b in backends} if whole else set()
        return self._known[frontend]

    def lacks_backend_of(self, entry: Connection) -> bool:
        """Whether a frontend that has backends does not have the one that answers."""
        _, destination, _, port = entry.original
        backends = self.at(Frontend(destination, port, Protocol.UDP))
        return bool(backends) and (entry.reply.source, entry.reply.source_port) not in backends
