# SPDX-License-Identifier: Apache-2.0
"""Flows of the packet path: which entries form one flow, and the state of the flow.

A flow from client C through frontend F to backend B has up to four entries (bpf/layout.h):

    ingress  C  -> F   destination := B        egress  C' -> B   source := N
    ingress  B  -> N   destination := C'       egress  B  -> C'  source := F

N is the masquerade address; C' is C, with another port if C's port was in use. Every entry knows C'
and B, and no two flows share both, so any entry leads to the others.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from itertools import combinations, product
from typing import NamedTuple

from ebpflb.entries.services import NO_FLAGS, Flags, Timeout, TimeoutKey
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol


class Hook(IntEnum):
    """The hooks by number, as in bpf/layout.h."""

    INGRESS = 1
    EGRESS = 2
    CLAIM = 3


class FlowKind(IntEnum):
    """What an entry does, by number as in bpf/layout/flow.h."""

    DNAT = 1
    UN_DNAT = 2
    SNAT = 3
    SNAT_PENDING = 4
    UN_SNAT = 5
    DIRECT = 6
    UN_DIRECT = 7
    RESTING = 8


class Tuple(NamedTuple):
    """A packet's addresses, ports and protocol at a hook."""

    source: Address
    destination: Address
    source_port: int
    destination_port: int
    protocol: int
    hook: int


class Flow(NamedTuple):
    """One entry: how packets of its tuple are rewritten.

    ``address`` and ``port`` replace the destination at ingress and the source at egress;
    ``other_port`` is the port of the other end. Times are nanoseconds of CLOCK_MONOTONIC. The last
    three fields belong to TCP (bpf/engine/flows/window.h).
    """

    created: int
    connection: int
    address: Address
    port: int
    other_port: int
    service: int
    backend: int
    ifindex: int
    kind: int
    flags: Flags
    packets: int = 0
    frontend_moves: int = 0
    last_seen: int = 0
    end: int = 0
    acknowledged: int = 0
    asked: int = 0


Look = Callable[[Tuple], Flow | None]
Entries = dict[Tuple, Flow]


class FlowState(StrEnum):
    """The state of a flow: for UDP by which sides have sent, otherwise by handshake and end.

    conntrack calls these states SYN_SENT, SYN_RECV, ESTABLISHED, CLOSE_WAIT, LAST_ACK, CLOSE and
    TIME_WAIT; for UDP unreplied, replied and assured.
    """

    OPENING = "opening"  # the backend has not answered
    ANSWERED = "answered"  # the client has not acknowledged the answer
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    RESET = "reset"
    RESTING = "resting"  # a closed flow of which only the entry remains that holds its source port
    ONE_WAY = "one-way"
    BOTH_WAYS = "both ways"
    STREAM = "stream"


STREAM_AFTER = 2  # seconds: conntrack calls an answered UDP flow that lasts longer a stream
_PORT_HOLDERS = {FlowKind.UN_SNAT, FlowKind.RESTING}


def is_client_request(flow: Flow) -> bool:
    """Whether this entry is the one for the client's incoming packets; a flow has exactly one."""
    return flow.kind in (FlowKind.DNAT, FlowKind.DIRECT)


def between_hooks(key: Tuple, flow: Flow) -> Tuple:
    """Return the tuple C' -> B at egress, from any entry of the flow."""
    if key.hook == Hook.EGRESS:
        return key if "request" in flow.flags else reverse(key)
    if is_client_request(flow):
        ends = key.source, flow.address, flow.other_port, flow.port
    else:
        ends = flow.address, key.source, flow.port, key.source_port
    return Tuple(*ends, key.protocol, Hook.EGRESS)


def reverse(key: Tuple) -> Tuple:
    """Return the tuple of the opposite direction at the same hook."""
    source, destination, source_port, destination_port, protocol, hook = key
    return Tuple(destination, source, destination_port, source_port, protocol, hook)


def request_tuple(key: Tuple, reply: Flow) -> Tuple:
    """Return the tuple C -> F at ingress, from the entry of B -> C' at egress."""
    ends = key.destination, reply.address, reply.other_port, reply.port
    return Tuple(*ends, key.protocol, Hook.INGRESS)


def masqueraded_reply_tuple(key: Tuple, snat: Flow) -> Tuple:
    """Return the tuple B -> N at ingress, from the entry of C' -> B at egress."""
    ends = key.destination, snat.address, key.destination_port, snat.port
    return Tuple(*ends, key.protocol, Hook.INGRESS)


def gather(key: Tuple, flow: Flow, look: Look) -> Entries:
    """Return all entries of the flow that ``flow`` belongs to; the client's request comes first.

    If the other entries do not lead back to ``flow``, only ``flow`` is returned: a newer flow took
    its place, or the entries between were evicted.
    """
    inside = between_hooks(key, flow)

    def find(at: Tuple | None) -> Flow | None:
        found = flow if at == key else look(at) if at else None
        return found if at and found and between_hooks(at, found) == inside else None

    reply_at = reverse(inside)
    reply = find(reply_at)
    known_request = key if is_client_request(flow) else None
    request_at = request_tuple(reply_at, reply) if reply else known_request
    request = find(request_at)
    plain = request and "masquerade" not in request.flags
    snat = None if plain else find(inside)
    has_port = snat and snat.kind == FlowKind.SNAT
    un_snat_at = masqueraded_reply_tuple(inside, snat) if snat and has_port else None
    places = ((request_at, request), (inside, snat), (un_snat_at, find(un_snat_at)))
    whole = {at: found for at, found in (*places, (reply_at, reply)) if at and found}
    return whole if key in whole else {key: flow}


def chosen_port(entries: Entries) -> Tuple | None:
    """Return the key of the reply entry that holds a port allocated by this node, or None."""
    for key, flow in entries.items():
        if flow.kind == FlowKind.UN_SNAT:
            return key
    for key, flow in entries.items():
        is_reply = flow.kind in (FlowKind.UN_DNAT, FlowKind.UN_DIRECT)
        if is_reply and flow.other_port != key.destination_port:
            return key
    return None


def state(protocol: int, entries: Collection[Flow]) -> FlowState:
    """Return the state of a flow with these entries; evicted entries are unknown.

    If only the entry is left that holds a connection's masquerade port, the connection is over and
    the port rests.
    """
    flags = [flow.flags for flow in entries]
    if protocol == Protocol.UDP:
        lasted = max(flow.last_seen for flow in entries) - min(flow.created for flow in entries)
        return datagrams_state(flags, is_stream=lasted > STREAM_AFTER * 1_000_000_000)
    found = connection_state(protocol, flags)
    if found is not FlowState.RESET and all(flow.kind in _PORT_HOLDERS for flow in entries):
        return FlowState.RESTING
    return found


def datagrams_state(flags: Collection[Flags], *, is_stream: bool) -> FlowState:
    """Return the state of a UDP flow; ``is_stream``: whether it has lasted as long as a stream."""
    if not _has_been_seen([each for each in flags if "request" not in each]):
        return FlowState.ONE_WAY
    return FlowState.STREAM if is_stream else FlowState.BOTH_WAYS


def connection_state(protocol: int, flags: Collection[Flags]) -> FlowState:
    """Return the state of a connection, by the flags of its entries.

    A side without an entry is assumed to have been seen, and to have closed if the other side has.
    The last chunk of SCTP's shutdown counts as a reset (bpf/net/packet.h).
    """
    requests = [each for each in flags if "request" in each]
    replies = [each for each in flags if "request" not in each]
    fins = [any("fin" in each for each in side) for side in (requests, replies)]
    if any("rst" in each for each in flags):
        return FlowState.CLOSED if protocol == Protocol.SCTP and any(fins) else FlowState.RESET
    if any(fins):
        has_both = requests and replies
        return FlowState.CLOSING if has_both and not all(fins) else FlowState.CLOSED
    if not _has_been_seen(replies):
        return FlowState.OPENING
    return FlowState.OPEN if _has_been_seen(requests) else FlowState.ANSWERED


def _has_been_seen(side: Collection[Flags]) -> bool:
    """Whether one entry of a side has been seen, or the side has no entry.

    The side's other entry is never used if the CNI masquerades too, or if the backend is in the
    node's network namespace.
    """
    return not side or any("seen" in each for each in side)


# Connections in the kernel's conntrack: their translation and their state.

# enum ip_conntrack_status of include/uapi/linux/netfilter/nf_conntrack_common.h
SEEN_REPLY, ASSURED, SOURCE_NAT, DESTINATION_NAT = 1 << 1, 1 << 2, 1 << 4, 1 << 5

# enum tcp_conntrack of include/uapi/linux/netfilter/nf_conntrack_tcp.h
TCP_STATES = (
    "none",
    "syn-sent",
    "syn-recv",
    "established",
    "fin-wait",
    "close-wait",
    "last-ack",
    "time-wait",
    "close",
    "syn-sent2",
)
_CONNTRACK_STATES = {
    "established": FlowState.OPEN,
    "fin-wait": FlowState.CLOSING,
    "close-wait": FlowState.CLOSING,
    "last-ack": FlowState.CLOSED,
    "time-wait": FlowState.CLOSED,
    "close": FlowState.RESET,
}
# The states of connections that have ended, while the entry remains.
ENDED_TCP_STATES = frozenset(
    number
    for number, name in enumerate(TCP_STATES)
    if _CONNTRACK_STATES.get(name) in (FlowState.CLOSED, FlowState.RESET)
)


class Ends(NamedTuple):
    """Source and destination of the packets of one direction."""

    source: Address
    destination: Address
    source_port: int
    destination_port: int

    def reversed(self) -> "Ends":
        return Ends(self.destination, self.source, self.destination_port, self.source_port)


class Connection(NamedTuple):
    """One entry: the client sends ``original``, the backend answers with ``reply``.

    Without NAT ``reply`` is ``original`` reversed. ``reply.source`` is the backend, and
    ``reply.destination`` the client, or the address and port that replace the client's.
    """

    protocol: Protocol
    original: Ends
    reply: Ends
    status: int = 0  # bits of enum ip_conntrack_status
    seconds: int = 0  # until it times out
    tcp_state: int = 0  # an index of TCP_STATES
    mark: int = 0
    identity: bytes = b""  # attributes that tell the kernel which entry this is, for its deletion

    @property
    def is_translated(self) -> bool:
        """Whether requests get another destination; IPVS sets no bit of the status."""
        asked, answering = self.original, self.reply
        return asked[1::2] != (answering.source, answering.source_port)

    @property
    def state(self) -> FlowState:
        """The state as a FlowState; conntrack's own name is ``state_name``."""
        if self.protocol == Protocol.TCP:
            return _CONNTRACK_STATES.get(self.state_name, FlowState.OPENING)
        return FlowState.BOTH_WAYS if self.status & SEEN_REPLY else FlowState.ONE_WAY

    @property
    def state_name(self) -> str:
        """The TCP state as conntrack names it; otherwise "replied" or "unreplied"."""
        if self.protocol == Protocol.TCP:
            return TCP_STATES[self.tcp_state] if self.tcp_state < len(TCP_STATES) else "unknown"
        return "replied" if self.status & SEEN_REPLY else "unreplied"


# When an idle flow expires. A flow is deleted as a whole; its most recently used entry counts.
#
# Timeouts that the operator did not set are kube-proxy's (kube-proxy.md 11.3), else conntrack's.
# The programs read them from map timeouts, and take over the port of an idle flow.

_PROTOCOLS = frozenset(Protocol)
KEPT = 120  # seconds: an open flow used within this time never loses its port to another
_OPEN = {FlowState.OPEN, FlowState.CLOSING, FlowState.STREAM}


def _states() -> Iterator[tuple[TimeoutKey, FlowState]]:
    """Yield the states of flows with a port allocated by this node, by the flags of two entries."""
    words = ("seen", "fin", "rst")
    replies = [frozenset(some) for n in range(4) for some in combinations(words, n)]
    requests = [NO_FLAGS, *(reply | {"request"} for reply in replies)]
    for protocol, request, reply in product(Protocol, requests, replies):
        flags = [*filter(None, [request]), reply]
        if protocol == Protocol.UDP:
            for is_stream in (False, True):
                key = TimeoutKey(protocol, int(is_stream), request, reply)
                yield key, datagrams_state(flags, is_stream=is_stream)
        else:
            found = connection_state(protocol, flags)
            rests = found is FlowState.CLOSED or (not request and found is not FlowState.RESET)
            key = TimeoutKey(protocol, 0, request, reply)
            yield key, FlowState.RESTING if rests else found


class Expired(NamedTuple):
    """A flow to delete, with its entries in the order of deletion; ``resting`` keeps the port."""

    entries: Entries
    resting: Tuple | None = None

    @property
    def rest(self) -> Entries:
        """The entry that keeps the flow's port, if any."""
        if self.resting is None:
            return {}
        former = self.entries[self.resting]
        return {self.resting: former._replace(kind=FlowKind.RESTING, flags=former.flags | {"fin"})}


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds; 0 means the default."""

    established: int = 0
    close_wait: int = 0
    udp: int = 0
    udp_stream: int = 0

    @cached_property
    def seconds(self) -> dict[Protocol, dict[FlowState, int]]:
        """Protocol -> state of a flow -> timeout in seconds."""
        tcp = {
            FlowState.OPENING: 5,  # a client that tries again opens another flow
            FlowState.ANSWERED: 60,  # nf_conntrack_tcp_timeout_syn_recv
            FlowState.OPEN: self.established or 24 * 3600,
            FlowState.CLOSING: self.close_wait or 3600,
            FlowState.CLOSED: 30,  # nf_conntrack_tcp_timeout_last_ack: the last ACK may get lost
            FlowState.RESET: 10,  # nf_conntrack_tcp_timeout_close
            FlowState.RESTING: 120,  # nf_conntrack_tcp_timeout_time_wait
        }
        udp = {
            FlowState.ONE_WAY: self.udp or 30,
            FlowState.BOTH_WAYS: self.udp or 30,
            FlowState.STREAM: self.udp_stream or 120,
        }
        sctp = tcp | {
            FlowState.OPEN: 300,
            FlowState.CLOSING: 60,
            FlowState.RESTING: 30,  # like CLOSED: SCTP has no TIME_WAIT
        }  # a heartbeat every 30 s (RFC 9260 16)
        return {Protocol.TCP: tcp, Protocol.UDP: udp, Protocol.SCTP: sctp}

    @cached_property
    def table(self) -> dict[TimeoutKey, Timeout]:
        """The entries of map timeouts: when the programs may take over the port of a flow."""
        return {
            key: Timeout(self.seconds[Protocol(key.protocol)][found], KEPT if found in _OPEN else 0)
            for key, found in _states()
        }

    def idle_limit(self, protocol: Protocol, flags: Flags) -> int:
        """The idle nanoseconds after which an entry with these flags has its whole flow read.

        Never longer than the flow's own timeout. A FIN may be the first or the second of the flow;
        a side that has reset, or has sent nothing yet, shows this in its own entry.
        """
        if protocol == Protocol.UDP:
            may_be = {datagrams_state([flags], is_stream=lasted) for lasted in (False, True)}
        else:
            may_be = {connection_state(protocol, [flags])}
            if FlowState.CLOSED in may_be:
                may_be.add(FlowState.CLOSING)
        return min(self._nanoseconds(protocol, each) for each in may_be)

    def expired(
        self, candidates: Iterable[tuple[Tuple, Flow]], look: Look, now: int
    ) -> Iterator[Expired]:
        """Yield the expired flows among these entries, with the entries in deletion order."""
        for key, flow in candidates:
            entries = gather(key, flow, look)
            if key.protocol not in _PROTOCOLS:  # not written by a program
                yield Expired(entries)
                continue
            protocol, found = Protocol(key.protocol), state(key.protocol, entries.values())
            idle = now - max(entry.last_seen for entry in entries.values())
            if idle < self._nanoseconds(protocol, found):
                continue
            if found is FlowState.CLOSED and idle < self._nanoseconds(protocol, FlowState.RESTING):
                yield Expired(entries, chosen_port(entries))
            else:
                yield Expired(entries)

    def _nanoseconds(self, protocol: Protocol, found: FlowState) -> int:
        return self.seconds[protocol][found] * 1_000_000_000
