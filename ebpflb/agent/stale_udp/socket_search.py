# SPDX-License-Identifier: Apache-2.0
"""Find stale UDP sockets in the map of sockets, and end them in their network namespaces."""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cache

from ebpflb.agent.stale_udp.lookups import Maps, ServedFrontends, is_untranslated
from ebpflb.entries.flows import Ends
from ebpflb.entries.services import Frontend
from ebpflb.errors import NodeError
from ebpflb.kernel.maps.readers import RememberedSockets
from ebpflb.kernel.maps.records import EndedSocket, Peer, PeerFrontend, record
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.node.sock_diag import OPENING, Connected, SockDiag
from ebpflb.model.addresses import Family, family
from ebpflb.model.services import Protocol

log = logging.getLogger(__name__)

_PEER_FRONTEND = record("struct peer_frontend")

Sockets = dict[Peer, PeerFrontend]
Counts = Counter[Family]

# Runs bpf/hooks/socket_end.c on a struct ended_socket.
EndSocket = Callable[[bytes], int]
_ENDED_SOCKET = record("struct ended_socket")
_ANYWHERE = 0  # the cookie of no network namespace: every one is searched


# Calls a function in the network namespaces with these cookies (node.namespaces).
EachNamespace = Callable[[Callable[[], SockDiag], Collection[int]], Iterator[SockDiag]]


def remembered(maps: Maps, peer: Peer) -> PeerFrontend | None:
    """Return a datagram socket's data about its peer. bpf/sockets/datagram.h."""
    own = RememberedSockets(maps).get(peer.socket)
    is_own = own and (own.peer.address, own.peer.port) == (peer.address, peer.port)
    if own and is_own and not own.is_shared:
        return own.peer
    found: PeerFrontend | None = maps["peers"].get(peer)
    return found or (own.peer if own and is_own else None)


def peers_where(maps: Maps, is_wanted: Callable[[PeerFrontend], bool]) -> Sockets:
    """Return the peers of sockets for which this holds.

    Many sockets have the same data about a peer, which is unpacked and judged only once.
    """

    @cache
    def wanted(packed: bytes) -> PeerFrontend | None:
        entry = _PEER_FRONTEND.unpack(packed)
        return entry if is_wanted(entry) else None

    own = {
        Peer(int.from_bytes(key, sys.byteorder), entry.address, entry.port): entry
        for key, value in RememberedSockets(maps).packed_items()
        if (entry := wanted(value[: _PEER_FRONTEND.struct.size]))
    }
    further = {
        maps["peers"].key.unpack(key): entry
        for key, value in maps["peers"].packed_items()
        if (entry := wanted(value))
    }
    return own | further


def stale_sockets(maps: Maps, backends: Collection[int] = ()) -> Sockets:
    """Return the stale peers of datagram sockets, and the stream sockets of these backends.

    Not those whose endpoint still serves the frontend, by another id: a port may be renamed.
    """
    frontends = ServedFrontends(maps)

    def is_wanted(entry: PeerFrontend) -> bool:
        if entry.frontend.protocol == Protocol.TCP:
            return entry.backend in backends and not frontends.may_get(entry)
        return frontends.is_stale(entry)

    return peers_where(maps, is_wanted)


def namespaces_of(maps: Maps, peers: Collection[Peer]) -> set[int]:
    """Return the cookies of the sockets' namespaces; of a socket without an own entry _ANYWHERE."""
    entries = (RememberedSockets(maps).get(peer.socket) for peer in peers)
    return {entry.netns if entry else _ANYWHERE for entry in entries}


class SocketEnder:
    """Ends sockets, and has the programs forget their peers."""

    def __init__(self, maps: Maps, each_namespace: EachNamespace, end_socket: EndSocket) -> None:
        self.maps, self.each_namespace, self.end_socket = maps, each_namespace, end_socket

    def end(self, stale: Sockets) -> tuple[Counts, Sockets]:
        """End these sockets; stream sockets only if they are still connecting.

        Returns how many per family were ended, and the entries without a connected socket. Raises
        KernelError if sockets cannot be listed.
        """
        done, missing = Counts(), dict(stale)
        if not stale:
            return done, missing
        for diag in self.each_namespace(SockDiag, namespaces_of(self.maps, stale)):
            with diag:
                found = _connected(diag, missing)
                done += self._end(diag, found, stale)
            for peer in found:
                del missing[peer]
            if not missing:
                break
        return done, missing

    def end_untranslated(self) -> Counts:
        """End the node's own sockets that were connected before their frontend was served."""
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
                if stale[peer].frontend.protocol == Protocol.UDP:
                    self.end_socket(_ENDED_SOCKET.pack(EndedSocket(peer.socket, stale[peer])))
                counts[family(peer.address)] += 1
                del remaining[peer]
        return counts


_STATES: dict[int, int | None] = {Protocol.UDP: None, Protocol.TCP: OPENING}


def _connected(diag: SockDiag, stale: Sockets) -> dict[Peer, Connected]:
    """Return the stale sockets that are in this namespace and still have the same peer."""
    ports = {peer.port for peer in stale}
    port = ports.pop() if len(ports) == 1 else 0
    listed = {
        Peer(one.cookie, *one.remote): one
        for protocol in {entry.frontend.protocol for entry in stale.values()}
        for one in diag.connected(protocol, port, states=_STATES[protocol])
    }
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
