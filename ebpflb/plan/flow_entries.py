# SPDX-License-Identifier: Apache-2.0
"""Flows as the packet path keeps them: which entries are one flow, and how it stands.

A flow from client C through frontend F to backend B has up to four entries (bpf/layout.h):

    ingress  C  -> F   destination := B        egress  C' -> B   source := N
    ingress  B  -> N   destination := C'       egress  B  -> C'  source := F

N is the masquerade; C' is C, with another port where its own was in use. Every entry knows C' and
B, and no two flows share both: that is how one entry leads to the others.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum, StrEnum
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Flags


class Hook(IntEnum):
    """By number, as in bpf/layout.h."""

    INGRESS = 1
    EGRESS = 2


class FlowKind(IntEnum):
    """What an entry does, by number as in bpf/layout/flow.h."""

    DNAT = 1
    UN_DNAT = 2
    SNAT = 3
    SNAT_PENDING = 4
    UN_SNAT = 5
    DIRECT = 6
    UN_DIRECT = 7


class Tuple(NamedTuple):
    """A packet as a hook sees it."""

    source: Address
    destination: Address
    source_port: int
    destination_port: int
    protocol: int
    hook: int


class Flow(NamedTuple):
    """One entry: what becomes of the packets of its tuple.

    ``address`` and ``port`` replace the destination at ingress and the source at egress;
    ``other_port`` is the other end's port. Times are nanoseconds of CLOCK_MONOTONIC.
    """

    last_seen: int
    created: int
    address: Address
    port: int
    other_port: int
    service: int
    backend: int
    kind: int
    flags: Flags
    ifindex: int = 0
    frontend_moves: int = 0


Look = Callable[[Tuple], Flow | None]
Entries = dict[Tuple, Flow]


class FlowState(StrEnum):
    """How a flow stands: UDP's by which sides have sent, others' by their handshake and end."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    RESET = "reset"
    ONE_WAY = "one-way"
    BOTH_WAYS = "both ways"


def is_client_request(flow: Flow) -> bool:
    """Whether this is the entry of the client's packets as they come in: a flow has one."""
    return flow.kind in (FlowKind.DNAT, FlowKind.DIRECT)


def between_hooks(key: Tuple, flow: Flow) -> Tuple:
    """C' -> B as egress sees it, from any entry of the flow."""
    if key.hook == Hook.EGRESS:
        return key if "request" in flow.flags else reverse(key)
    if is_client_request(flow):
        ends = key.source, flow.address, flow.other_port, flow.port
    else:
        ends = flow.address, key.source, flow.port, key.source_port
    return Tuple(*ends, key.protocol, Hook.EGRESS)


def reverse(key: Tuple) -> Tuple:
    """The same ends the other way round, at the same hook."""
    source, destination, source_port, destination_port, protocol, hook = key
    return Tuple(destination, source, destination_port, source_port, protocol, hook)


def request_tuple(key: Tuple, reply: Flow) -> Tuple:
    """C -> F at ingress, from the entry of B -> C' at egress."""
    ends = key.destination, reply.address, reply.other_port, reply.port
    return Tuple(*ends, key.protocol, Hook.INGRESS)


def masqueraded_reply_tuple(key: Tuple, snat: Flow) -> Tuple:
    """B -> N at ingress, from the entry of C' -> B at egress."""
    ends = key.destination, snat.address, key.destination_port, snat.port
    return Tuple(*ends, key.protocol, Hook.INGRESS)


def gather(key: Tuple, flow: Flow, look: Look) -> Entries:
    """All entries of the flow that has this one; the client's request comes first.

    An entry to which the others do not lead back stands alone: a newer flow has its place, or
    those between were evicted.
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


def state(protocol: int, flags: Iterable[Flags]) -> FlowState:
    """How a flow stands, by the flags of its entries; those that were evicted are not known.

    A side has been seen if one entry has: where the CNI masquerades as well, or a backend shares
    the node's network, the other one never is. Of a side without an entry the best is assumed: it
    has been seen, and has closed if the other side has. The last chunk of SCTP's shutdown counts
    as a reset (bpf/net/transport.h).
    """
    entries = list(flags)
    requests = [each for each in entries if "request" in each]
    replies = [each for each in entries if "request" not in each]
    seen = (not side or any("seen" in each for each in side) for side in (requests, replies))
    has_requested, has_replied = seen
    if protocol == Protocol.UDP:
        return FlowState.BOTH_WAYS if has_replied else FlowState.ONE_WAY
    fins = [any("fin" in each for each in side) for side in (requests, replies)]
    if any("rst" in each for each in entries):
        return FlowState.CLOSED if protocol == Protocol.SCTP and any(fins) else FlowState.RESET
    if any(fins):
        has_both = requests and replies
        return FlowState.CLOSING if has_both and not all(fins) else FlowState.CLOSED
    return FlowState.OPEN if has_requested and has_replied else FlowState.OPENING
