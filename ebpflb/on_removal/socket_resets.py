# SPDX-License-Identifier: Apache-2.0
"""Connections whose client is a socket of this node, or of one of its pods.

The socket is ended by SOCK_DESTROY: its owner gets ECONNABORTED from the call that waits, or from
the next one, and the kernel sends the backend a reset. The socket's entry in the map stays until it
is closed.
"""

import errno
import logging
from collections.abc import Callable, Iterable, Iterator

from ebpflb.datapath.maps.socket_records import PeerFrontend
from ebpflb.errors import KernelError
from ebpflb.model import on_removal
from ebpflb.model.services import Protocol
from ebpflb.node.sock_diag import Connected, SockDiag
from ebpflb.on_removal.gone_connections import ResetCounts, WantedConnections
from ebpflb.plan.entries import Frontend
from ebpflb.plan.watched_ports import Endpoint
from ebpflb.stale_udp.end import EachNamespace
from ebpflb.stale_udp.lookups import Maps
from ebpflb.stale_udp.socket_search import Answers

log = logging.getLogger(__name__)


class SocketConnections:
    """``can_destroy`` tries whether this kernel ends TCP sockets."""

    kind = on_removal.BY_SOCKETS

    def __init__(
        self, maps: Maps, each_namespace: EachNamespace, can_destroy: Callable[[], bool]
    ) -> None:
        self._maps, self._each_namespace, self._can_destroy = maps, each_namespace, can_destroy
        self._can: bool | None = None  # not tried yet

    def found(self, wanted: WantedConnections) -> Iterable[tuple[Frontend, Endpoint]]:
        entries = self._entries(wanted).values()
        return {(entry.frontend, (entry.address, entry.port)) for entry in entries}

    def reset(self, wanted: WantedConnections, *, is_last: bool) -> ResetCounts:
        entries, ended = self._entries(wanted), ResetCounts()
        if not entries or not self._can_end(len(entries)):
            return ended
        for _, diag in self._each_namespace(SockDiag):
            with diag:
                for entry in _end(diag, entries):
                    ended[entry.frontend, (entry.address, entry.port)] += 1
            if not entries:
                break
        return ended

    def _entries(self, wanted: WantedConnections) -> dict[int, PeerFrontend]:
        """By the cookie of the socket."""

        def ask(entry: PeerFrontend) -> bool:
            is_tcp = entry.frontend.protocol == Protocol.TCP
            return is_tcp and wanted.has(entry.frontend, (entry.address, entry.port))

        answers = Answers(self._maps, ask)
        return {peer.socket: entry for peer, entry in answers.entries(wanted=True).items()}

    def _can_end(self, count: int) -> bool:
        if self._can is None:
            self._can = self._can_destroy()
        if not self._can:
            log.warning("this kernel ends no TCP sockets: %d keep an endpoint that has gone", count)
        return self._can


def _end(diag: SockDiag, entries: dict[int, PeerFrontend]) -> Iterator[PeerFrontend]:
    """Those that are in this namespace; a socket that is connected elsewhere by now is left alone.

    They are taken from ``entries``.
    """
    ports = {entry.port for entry in entries.values()}
    port = ports.pop() if len(ports) == 1 else 0
    for one in list(diag.connected(Protocol.TCP, port)):
        entry = entries.get(one.cookie)
        if entry and one.remote == (entry.address, entry.port) and _destroyed(diag, one):
            yield entries.pop(one.cookie)


def _destroyed(diag: SockDiag, one: Connected) -> bool:
    """False too for one in TIME_WAIT by now, of which older kernels say EOPNOTSUPP."""
    try:
        return diag.destroy(one)
    except KernelError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
