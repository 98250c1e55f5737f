# SPDX-License-Identifier: Apache-2.0
"""How stale connections are found and end: sockets and entries of conntrack.

plan/stale.py says which ones are stale.

A connect hook gives a socket the address of an endpoint, and no hook can send it elsewhere. So the
socket is ended by SOCK_DESTROY: its owner gets ECONNABORTED (a UDP socket that sends first gets
EDESTADDRREQ) and connects again. Sockets that connected to the endpoint directly are left alone.

An entry of conntrack is deleted: the client's next packet opens another one, to an endpoint that
serves. An endpoint that gets a segment of an open connection resets it. They may be entries of the
netfilter engine, or of a kube-proxy that served before.

The look-ups that say what serves are those of the programs; each is named after the C function with
the same result, and tests/native/test_lookups.py compares them. The maps are read while they are
written. A service that changes meanwhile is seen in its old or new state, because its former slots
stay in quarantine; if slots were nevertheless given to another service, nothing of it is stale.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from ipaddress import ip_address
from typing import Protocol as Interface

from ebpflb.entries.flows import DESTINATION_NAT, ENDED_TCP_STATES, SEEN_REPLY, Connection, Tuple
from ebpflb.entries.flows import Ends as FlowEnds
from ebpflb.entries.services import Frontend, Range, ServiceEntry
from ebpflb.errors import NodeError
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.readers import FrontendKeys, RememberedSockets
from ebpflb.kernel.maps.records import EndedSocket, Peer, PeerFrontend, record
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.node import kube_proxy, sock_diag
from ebpflb.kernel.node.sock_diag import Connected, SockDiag
from ebpflb.model.addresses import Address, family
from ebpflb.model.services import Protocol
from ebpflb.plan.desired import ANY
from ebpflb.plan.stale import CHANGING, Endpoint, Endpoints, Ends

Maps = Mapping[str, Map]
Ended = Counter[tuple[Frontend, Endpoint]]


def service_find(maps: Maps, frontend: Frontend) -> ServiceEntry | None:
    """Return the service of a frontend, for a socket in the node's own network namespace.

    Other namespaces differ only in that loopback serves no NodePorts there, so none of their
    sockets ever gets a backend for a loopback address. bpf/rules/frontend.h.
    """
    service: ServiceEntry | None = None
    if not frontend.address.is_unspecified:
        service = maps["services"].get(frontend)
    if service is None and node_serves(maps, frontend.address):
        service = maps["services"].get(_nodeport(frontend))
    return service


def _nodeport(frontend: Frontend) -> Frontend:
    return frontend._replace(address=ANY[family(frontend.address)])


def node_serves(maps: Maps, address: Address) -> bool:
    """Whether NodePorts are served at an address. bpf/rules/frontend.h."""
    if address.is_loopback or address.is_unspecified:  # Linux connects both to loopback
        return True
    return maps["node_addresses"].get(address) is not None


def policy_is_local_only(service: ServiceEntry) -> bool:
    """Whether the policy Local applies to sockets, which count as pods. bpf/rules/policy.h."""
    return "local" in service.flags and "external" not in service.flags


def socket_range(service: ServiceEntry) -> Range:
    """Return the slots from which a socket gets its backend. bpf/path/select_backend.h."""
    return service.local if policy_is_local_only(service) else service.cluster


def serves(maps: Maps, frontend: Frontend) -> bool:
    """Whether a socket of the node that connects to the frontend now gets a backend.

    Source ranges were asked before: a socket that they do not admit is never connected.
    """
    service = service_find(maps, frontend)
    return service is not None and socket_range(service).size > 0


class ServedFrontends:
    """Endpoints by frontend, as plan.stale.Stale asks for them; each is read only once."""

    def __init__(self, maps: Maps) -> None:
        self.endpoints = cache(partial(_endpoints, maps))
        self.keys = cache(partial(_keys, maps))


def _endpoints(maps: Maps, frontend: Frontend) -> Endpoints | None:
    service = service_find(maps, frontend)
    if service is None:
        return None
    base, size = service.block
    backends = [maps["slots"].get(base + index) for index in range(size)]
    if any(each.service != service.id for each in backends):
        return CHANGING
    return {(each.address, each.port): each.flags for each in backends}


def _keys(maps: Maps, frontend: Frontend) -> tuple[Frontend, ...]:
    is_itself = maps["services"].get(frontend) is not None
    if is_itself or not node_serves(maps, frontend.address):
        return (frontend,)
    return frontend, _nodeport(frontend)


class Judge(Interface):
    """A plan.stale.Stale."""

    def ends(self, frontend: Frontend, endpoint: Endpoint, *, is_socket: bool = False) -> Ends: ...


# Sockets.

_PEER_FRONTEND, _ENDED_SOCKET = record("struct peer_frontend"), record("struct ended_socket")
_ANYWHERE = 0  # the cookie of no network namespace: every one is searched

# Runs bpf/hooks/socket_end.c on a struct ended_socket.
EndSocket = Callable[[bytes], int]
# Calls a function in the network namespaces with these cookies (node.namespaces).
EachNamespace = Callable[[Callable[[], SockDiag], Collection[int]], Iterator[SockDiag]]
_Peers = dict[Peer, PeerFrontend]

# The TCP states of the sockets that end; a UDP socket with a peer has one state.
_STATES: Mapping[tuple[int, Ends], int] = {
    (Protocol.UDP, Ends.ALL): sock_diag.CONNECTED,
    (Protocol.TCP, Ends.UNANSWERED): sock_diag.OPENING,
    (Protocol.TCP, Ends.ALL): sock_diag.OF_CONNECTIONS,
}


class SocketEnder:
    """Ends sockets, and has the programs forget their peers."""

    def __init__(self, maps: Maps, each_namespace: EachNamespace, end_socket: EndSocket) -> None:
        self.maps, self.each_namespace, self.end_socket = maps, each_namespace, end_socket

    def end(self, judge: Judge, protocols: Collection[int]) -> Ended:
        """End the sockets of these protocols that the judge names; return how many.

        Raises KernelError if sockets cannot be listed.
        """
        ended, left = Ended(), self._find(judge, protocols)
        if any(left.values()):
            for diag in self.each_namespace(SockDiag, self._namespaces(left.values())):
                with diag:
                    for (protocol, wanted), peers in left.items():
                        ended += self._end(diag, protocol, _STATES[protocol, wanted], peers)
                if not any(left.values()):
                    break
        return ended

    def end_untranslated(self, judge: Judge) -> Ended:
        """End the node's own sockets that were connected before their frontend was served."""
        with SockDiag() as diag:
            found = untranslated(self.maps, diag, judge)
            ended = [one.remote for one in found if diag.destroy(one)]
        return Ended((Frontend(*at, Protocol.UDP), at) for at in ended)

    def _find(self, judge: Judge, protocols: Collection[int]) -> dict[tuple[int, Ends], _Peers]:
        """Return the peers of sockets that may end, by protocol and verdict.

        Many sockets have the same data about a peer, which is unpacked and judged only once.
        """
        found: dict[tuple[int, Ends], _Peers] = {key: {} for key in _STATES}

        @cache
        def peers_of(packed: bytes) -> tuple[PeerFrontend, _Peers | None]:
            entry = _PEER_FRONTEND.unpack(packed)
            protocol, endpoint = entry.frontend.protocol, (entry.address, entry.port)
            if protocol not in protocols or not entry.is_connected or is_untranslated(entry):
                return entry, None
            verdict = judge.ends(entry.frontend, endpoint, is_socket=True)
            return entry, found.get((protocol, verdict))

        for key, value in RememberedSockets(self.maps).packed_items():
            entry, peers = peers_of(value[: _PEER_FRONTEND.struct.size])
            if peers is not None:
                peers[Peer(int.from_bytes(key, sys.byteorder), entry.address, entry.port)] = entry
        for key, value in self.maps["peers"].packed_items():
            entry, peers = peers_of(value)
            if peers is not None:
                peers[self.maps["peers"].key.unpack(key)] = entry
        return found

    def _namespaces(self, wanted: Iterable[_Peers]) -> set[int]:
        """Return the cookies of the sockets' namespaces; of one without own entry _ANYWHERE."""
        sockets = RememberedSockets(self.maps)
        entries = (sockets.get(peer.socket) for peers in wanted for peer in peers)
        return {entry.netns if entry else _ANYWHERE for entry in entries}

    def _end(self, diag: SockDiag, protocol: int, states: int, left: _Peers) -> Ended:
        """End the sockets that are in this namespace and in these states; take them from ``left``.

        Of two sockets with the same ends the kernel finds only one, until that one is ended. The
        owner of an ended socket may connect it again at once, so a program compares what is
        remembered of the socket and forgets the peer in one run.
        """
        ports = {peer.port for peer in left}
        if not ports:
            return Ended()
        listed = diag.connected(protocol, ports.pop() if len(ports) == 1 else 0, states=states)
        found = {Peer(one.cookie, *one.remote): one for one in listed}
        remaining, ended = {peer: one for peer, one in found.items() if peer in left}, Ended()
        while done := [peer for peer, one in remaining.items() if diag.destroy(one)]:
            for peer in done:
                entry = left.pop(peer)
                if protocol == Protocol.UDP:
                    self.end_socket(_ENDED_SOCKET.pack(EndedSocket(peer.socket, entry)))
                ended[entry.frontend, (peer.address, peer.port)] += 1
                del remaining[peer]
        return ended


def is_untranslated(entry: PeerFrontend) -> bool:
    """Whether the socket was connected without a backend, because none served (path/socket.h)."""
    return entry.backend == 0


def remembered(maps: Maps, peer: Peer) -> PeerFrontend | None:
    """Return a datagram socket's data about its peer. bpf/sockets/datagram.h."""
    own = RememberedSockets(maps).get(peer.socket)
    is_own = own and (own.peer.address, own.peer.port) == (peer.address, peer.port)
    if own and is_own and not own.is_shared:
        return own.peer
    found: PeerFrontend | None = maps["peers"].get(peer)
    return found or (own.peer if own and is_own else None)


def untranslated(maps: Maps, diag: SockDiag, judge: Judge) -> Iterator[Connected]:
    """Yield the node's own sockets that are connected to a frontend itself, though it has backends.

    They were connected before it was served (kube-proxy.md 11.1: flows that were never translated),
    and no hook translates the node's own packets; a pod's packets are translated at its device. A
    hook stores such sockets, except those that were connected before there was a Service: these are
    found by their cluster IP, which is used for nothing else. Sockets that netfilter translates by
    rules of kube-proxy are left alone, and those that IPVS leads to an endpoint that serves.
    """
    by_ipvs = cache(kube_proxy.datagrams_by_ipvs)

    def is_left(one: Connected, frontend: Frontend) -> bool:
        if translated_by_conntrack(one):
            return True
        endpoint = by_ipvs().get((one.local, one.remote))
        return endpoint is not None and judge.ends(frontend, endpoint) is Ends.NONE

    for one in list(diag.connected(Protocol.UDP)):
        found = remembered(maps, Peer(one.cookie, *one.remote))
        if found and not is_untranslated(found):
            continue
        if not found and maps["cluster_ips"].get(one.remote[0]) is None:
            continue
        frontend = found.frontend if found else Frontend(*one.remote, Protocol.UDP)
        if serves(maps, frontend) and not is_left(one, frontend):
            yield one


def translated_by_conntrack(one: Connected) -> bool:
    """Whether netfilter's NAT sends the socket's datagrams to another destination."""
    if not conntrack.count():
        return False
    (source, source_port), (destination, destination_port) = one.local, one.remote
    ends = FlowEnds(source, destination, source_port, destination_port)
    try:
        entries = conntrack.find([(Protocol.UDP, ends)])
        return any(entry.status & DESTINATION_NAT for entry in entries)
    except NodeError:  # conntrack cannot be asked
        return False


# Entries of conntrack, in the calling thread's network namespace.

_FEW_ENDPOINTS = 16  # for each of them the kernel walks through all entries: 0.03 s for 100,000


def delete_entries(
    maps: Maps,
    judge: Judge,
    protocols: Collection[Protocol],
    ports: Collection[int] | None = None,
    udp_endpoints: Collection[Endpoint] | None = None,
    are_open: bool = False,
    untranslated: bool = False,
) -> Ended:
    """Delete the entries of these protocols that the judge names; return how many.

    ``ports`` are those of the frontends to look at; None: all frontends in the maps.
    ``udp_endpoints`` are the only ones whose flows of UDP may be stale; None: any. ``are_open``:
    also TCP and SCTP that was answered. ``untranslated``: only what conntrack got while nothing
    translated; then the kernel leaves out everything else. Raises NodeError.
    """
    if not conntrack.count():
        return Ended()
    keys = FrontendKeys(maps)

    def is_wanted(protocol: int, address: bytes, port: int) -> bool:
        return keys(protocol, address, port) if ports is None else port in ports

    @cache
    def may_end(protocol: int, to: bytes, port: int, source: bytes, number: int) -> bool:
        frontend = Frontend(ip_address(to), port, protocol)
        return judge.ends(frontend, (ip_address(source), number)) is not Ends.NONE

    ended = Ended()
    for protocol in protocols:
        without = 0 if are_open or protocol == Protocol.UDP else SEEN_REPLY
        without |= DESTINATION_NAT if untranslated else 0
        few = udp_endpoints if protocol == Protocol.UDP else None
        for endpoint in [None] if few is None or len(few) > _FEW_ENDPOINTS else few:
            listed = conntrack.connections(
                is_wanted, protocol, without=without, may_be=may_end, endpoint=endpoint
            )
            ended += _delete(judge, listed)
    return ended


def delete_flows(judge: Judge, flows: Iterable[Tuple]) -> Ended:
    """Delete those of these UDP flows' entries that the judge names; return how many.

    ``flows`` are requests as ingress sees them. The kernel finds each entry by a hash, however
    large its table is. Raises NodeError.
    """
    return _delete(judge, conntrack.find((flow.protocol, FlowEnds(*flow[:4])) for flow in flows))


def _delete(judge: Judge, listed: Iterable[Connection]) -> Ended:
    ended = {entry: between for entry in listed if (between := _ending(judge, entry))}
    conntrack.delete(ended)
    return Ended(ended.values())


def _ending(judge: Judge, entry: Connection) -> tuple[Frontend, Endpoint] | None:
    """Return frontend and endpoint of an entry that ends, or None."""
    frontend = Frontend(entry.original.destination, entry.original.destination_port, entry.protocol)
    endpoint = entry.reply.source, entry.reply.source_port
    verdict, is_answered = judge.ends(frontend, endpoint), bool(entry.status & SEEN_REPLY)
    if verdict is Ends.NONE or (verdict is Ends.UNANSWERED and is_answered):
        return None
    has_ended = entry.protocol == Protocol.TCP and entry.tcp_state in ENDED_TCP_STATES
    return None if has_ended else (frontend, endpoint)
