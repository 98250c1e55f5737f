# SPDX-License-Identifier: Apache-2.0
"""Ends stale UDP sockets: ``SocketEnder.end`` finds them in their network namespaces.

Where the kernel cannot end sockets it rebinds their flows instead (rebind.py).
"""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from pyroute2 import NFCTSocket
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple

from ebpflb.datapath.maps.socket_records import Peer, PeerFrontend
from ebpflb.model.addresses import Family, family
from ebpflb.model.services import Protocol
from ebpflb.node.sock_diag import Connected, SockDiag
from ebpflb.plan.entries import Frontend
from ebpflb.stale_udp.lookups import Maps
from ebpflb.stale_udp.rebind import Rebinder, StaleFlow
from ebpflb.stale_udp.socket_search import (
    ServedFrontends,
    forget_peer,
    is_untranslated,
    remembered,
)

log = logging.getLogger(__name__)

EachNamespace = Callable[[Callable[[], SockDiag]], Iterator[tuple[bool, SockDiag]]]
Sockets = dict[Peer, PeerFrontend]
Counts = Counter[Family]

_CONNTRACK_COUNT = Path("/proc/sys/net/netfilter/nf_conntrack_count")


class SocketEnder:
    """``each_namespace`` calls a function in every network namespace (node.namespaces).

    ``can_end``: whether this kernel ends sockets.
    """

    def __init__(self, maps: Maps, each_namespace: EachNamespace, *, can_end: bool) -> None:
        self.maps, self.each_namespace, self.can_end = maps, each_namespace, can_end
        self.rebinder = Rebinder(maps)

    def end(self, stale: Sockets) -> tuple[Counts, Sockets]:
        """Ends these sockets, or rebinds their flows.

        Returns how many of each family were ended or rebound, and the entries for which no
        connected socket was found. Raises KernelError where sockets cannot be listed.
        """
        done, not_found = Counts(), dict(stale)
        self.rebinder.backends.clear()
        namespaces = self.each_namespace(SockDiag) if stale else iter(())
        for own, diag in namespaces:
            with diag:
                found = _connected(diag, not_found)
                done += self._end(diag, found) if self.can_end else self._rebind(found, stale, own)
            for peer in found:
                del not_found[peer]
            if not not_found:
                break
        return done, not_found

    def end_untranslated(self) -> Counts:
        """Ends the node's own sockets that were connected before anyone served their frontend."""
        if not self.can_end:
            return Counts()
        with SockDiag() as diag:
            ended = [one for one in untranslated(self.maps, diag) if diag.destroy(one)]
        return Counts(family(one.remote[0]) for one in ended)

    def _end(self, diag: SockDiag, found: dict[Peer, Connected]) -> Counts:
        """Of two sockets with the same ends the kernel finds only one, until that is ended."""
        remaining, counts = dict(found), Counts()
        while ended := [peer for peer, one in remaining.items() if diag.destroy(one)]:
            for peer in ended:
                forget_peer(self.maps, peer)
                counts[family(peer.address)] += 1
                del remaining[peer]
        return counts

    def _rebind(self, found: dict[Peer, Connected], stale: Sockets, own: bool) -> Counts:
        """No hook rewrites the packets that the node itself sends: its ``own`` sockets stay."""
        frontends, counts, unchanged = ServedFrontends(self.maps), Counts(), 0
        for peer, one in found.items():
            flow = StaleFlow(one.local, one.remote)
            rebound = False if own else self.rebinder.rebind(flow, stale[peer].frontend, frontends)
            counts[family(peer.address)] += rebound is True
            unchanged += rebound is False
        if unchanged:
            log.info("%d connected UDP sockets keep a backend that was removed", unchanged)
        return counts


def _connected(diag: SockDiag, stale: Sockets) -> dict[Peer, Connected]:
    """Those of the stale sockets that are in this namespace and still have the same peer."""
    ports = {peer.port for peer in stale}
    port = ports.pop() if len(ports) == 1 else 0
    listed = {Peer(one.cookie, *one.remote): one for one in diag.connected(Protocol.UDP, port)}
    return {peer: one for peer, one in listed.items() if peer in stale}


def untranslated(maps: Maps, diag: SockDiag) -> Iterator[Connected]:
    """The node's own sockets that are connected to a frontend itself, though it is served now.

    They were connected before it was served (kube-proxy.md 11.1: flows that were never
    translated), and no hook translates what the node itself sends; a pod's packets are translated
    at its device. A hook remembers such sockets, except those that were connected before there was
    a Service: these are found by their cluster IP, which nothing else has. Left alone are sockets
    that netfilter translates by rules of kube-proxy.
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
    if not _CONNTRACK_COUNT.exists():
        return False
    (source, sport), (destination, dport) = one.local, one.remote
    kind = socket.AF_INET if destination.version == 4 else socket.AF_INET6
    request = NFCTAttrTuple(kind, str(source), str(destination), int(Protocol.UDP), sport, dport)
    try:
        with NFCTSocket(nfgen_family=kind) as conntrack:
            entries = conntrack.entry("get", tuple_orig=request)
    except (NetlinkError, OSError):  # not tracked
        return False
    attributes = [entry.get_attr("CTA_TUPLE_REPLY") for entry in entries]  # None of the ACK
    replies = [NFCTAttrTuple.from_netlink(kind, each) for each in attributes if each]
    return any((reply.saddr, reply.sport) != (str(destination), dport) for reply in replies)
