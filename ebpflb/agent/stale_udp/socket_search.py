# SPDX-License-Identifier: Apache-2.0
"""Find stale UDP sockets: first in the map of sockets, then in their network namespaces; end them.

If the kernel cannot end sockets, their flows are rebound instead.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ebpflb.agent.stale_udp.lookups import Maps, ServedFrontends, SocketState, is_untranslated
from ebpflb.agent.stale_udp.rebind import Rebinder, StaleFlow
from ebpflb.errors import NodeError
from ebpflb.kernel.maps.records import EndedSocket, Peer, PeerFrontend, record
from ebpflb.kernel.maps.sockets import RememberedSockets
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.node.sock_diag import Connected, SockDiag
from ebpflb.model.addresses import Family, family
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Frontend
from ebpflb.plan.flow_entries import Ends

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
