# SPDX-License-Identifier: Apache-2.0
"""Moves stale datagram sockets: looks for them in every namespace, and ends or re-binds them."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.records import Peer, PeerFrontend
from ebpflb.model.addresses import Family, family
from ebpflb.model.services import Protocol
from ebpflb.node.sock_diag import Connected, SockDiag
from ebpflb.plan.stale import Stranded
from ebpflb.stale_udp.find import Serving
from ebpflb.stale_udp.rebind import Rebinding
from ebpflb.stale_udp.untranslated import untranslated

log = logging.getLogger(__name__)

Each = Callable[[Callable[[], SockDiag]], Iterator[tuple[bool, SockDiag]]]
Sockets = dict[Peer, PeerFrontend]
Moved = Counter[Family]


class Mover:
    """``each`` does something in every network namespace; ``ends``: whether sockets are ended."""

    def __init__(self, maps: Mapping[str, Map], each: Each, *, ends: bool) -> None:
        self.maps, self.each, self.ends = maps, each, ends
        self.rebinding = Rebinding(maps)

    def move(self, stale: Sockets) -> tuple[Moved, Sockets]:
        """How many were moved; and those that no connected socket was found for.

        Raises KernelError where sockets cannot be listed.
        """
        moved, left = Moved(), dict(stale)
        self.rebinding.bound.clear()
        namespaces = self.each(SockDiag) if left else iter(())
        for own, diag in namespaces:
            with diag:
                found = _found(diag, left)
                moved += self._end(diag, found) if self.ends else self._bind(found, left, own)
            for peer in found:
                del left[peer]
            if not left:
                break
        return moved, left

    def end_lost(self) -> Moved:
        """Ends the node's own sockets that are connected to a cluster IP itself."""
        if not self.ends:
            return Moved()
        with SockDiag() as diag:
            lost = [one for one in untranslated(self.maps, diag) if diag.destroy(one)]
        return Moved(family(one.there[0]) for one in lost)

    def _end(self, diag: SockDiag, found: dict[Peer, Connected]) -> Moved:
        """Of two sockets with the same ends the kernel finds one: the other when that is gone."""
        left, moved = dict(found), Moved()
        while ended := [peer for peer, one in left.items() if diag.destroy(one)]:
            self.maps["sockets"].delete(ended)
            for peer in ended:
                moved[family(peer.address)] += 1
                del left[peer]
        return moved

    def _bind(self, found: dict[Peer, Connected], stale: Sockets, own: bool) -> Moved:
        """Nothing translates what the node itself sends."""
        serving, moved, unmoved = Serving(self.maps), Moved(), 0
        for peer, one in found.items():
            stranded = Stranded(one.here, one.there)
            bound = False if own else self.rebinding.bind(stranded, stale[peer], serving)
            moved[family(peer.address)] += bound is True
            unmoved += bound is False
        if unmoved:
            log.info("%d connected UDP sockets keep a backend that has gone", unmoved)
        return moved


def _found(diag: SockDiag, sought: Sockets) -> dict[Peer, Connected]:
    """Those that are in this namespace and still connected to what is sought."""
    ports = {peer.port for peer in sought}
    port = ports.pop() if len(ports) == 1 else 0
    listed = {Peer(one.cookie, *one.there): one for one in diag.connected(Protocol.UDP, port)}
    return {peer: one for peer, one in listed.items() if peer in sought}
