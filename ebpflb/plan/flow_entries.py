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


class Tuple(NamedTuple):
    """A packet as a hook sees it."""

    source: Address
    destination: Address
    source_port: int
    destination_port: int
    protocol: int
    hook: int


class Flow(NamedTuple):
    """What becomes of it; times in nanoseconds of CLOCK_MONOTONIC."""

    last_seen: int
    created: int
    address: Address
    port: int
    other_port: int
    service: int
    backend: int
    flags: Flags
    ifindex: int = 0


Look = Callable[[Tuple], Flow | None]
Entries = dict[Tuple, Flow]


class FlowState(StrEnum):
    """How a flow stands: UDP's by who has spoken, others' by their handshake and their end."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    RESET = "reset"
    ONE_WAY = "one-way"
    BOTH_WAYS = "both ways"


def asks(key: Tuple, flow: Flow) -> bool:
    """Whether this is the entry of the client's packets as they come: of a flow there is one."""
    return key.hook == Hook.INGRESS and "request" in flow.flags


def middle(key: Tuple, flow: Flow) -> Tuple:
    """C' -> B as egress sees it, from any entry of the flow."""
    if key.hook == Hook.EGRESS:
        return key if "request" in flow.flags else back(key)
    if "request" in flow.flags:
        client, port, backend, target = key.source, key.source_port, flow.address, flow.port
        port = flow.other_port or port
    else:
        client, port, backend, target = flow.address, flow.port, key.source, key.source_port
    return Tuple(client, backend, port, target, key.protocol, Hook.EGRESS)


def back(key: Tuple) -> Tuple:
    """The same ends the other way round, at the same hook."""
    source, destination, source_port, destination_port, protocol, hook = key
    return Tuple(destination, source, destination_port, source_port, protocol, hook)


def asked(key: Tuple, reply: Flow) -> Tuple:
    """C -> F at ingress, from B -> C' at egress."""
    port = reply.other_port or key.destination_port
    return Tuple(key.destination, reply.address, port, reply.port, key.protocol, Hook.INGRESS)


def answered(key: Tuple, masquerade: Flow) -> Tuple:
    """B -> N at ingress, from C' -> B at egress."""
    to = masquerade.address, key.destination_port, masquerade.port
    return Tuple(key.destination, *to, key.protocol, Hook.INGRESS)


def gather(key: Tuple, flow: Flow, look: Look) -> Entries:
    """All entries of the flow that has this one; who asks comes first.

    An entry to which the others do not lead back stands alone: a newer flow has its place, or
    those between were evicted.
    """
    inside = middle(key, flow)

    def find(at: Tuple | None) -> Flow | None:
        found = flow if at == key else look(at) if at else None
        return found if at and found and middle(at, found) == inside else None

    reply = find(back(inside))
    request_at = asked(back(inside), reply) if reply else key if asks(key, flow) else None
    request = find(request_at)
    plain = request and "masquerade" not in request.flags
    masquerade = None if plain else find(inside)
    answer_at = answered(inside, masquerade) if masquerade and masquerade.port else None
    places = ((request_at, request), (inside, masquerade), (answer_at, find(answer_at)))
    whole = {at: found for at, found in (*places, (back(inside), reply)) if at and found}
    return whole if key in whole else {key: flow}


def state(protocol: int, flags: Iterable[Flags]) -> FlowState:
    """How a flow stands, by the flags of its entries; one that was evicted says nothing.

    A side has been seen if one entry has: where the CNI masquerades as well, or a backend shares
    the node's network, the other one never is. The last chunk of SCTP's shutdown counts as a
    reset (bpf/net/transport.h).
    """
    every = list(flags)
    requests = [words for words in every if "request" in words]
    replies = [words for words in every if "request" not in words]
    spoken = (not side or any("seen" in words for words in side) for side in (requests, replies))
    has_asked, has_replied = spoken
    if protocol == Protocol.UDP:
        return FlowState.BOTH_WAYS if has_replied else FlowState.ONE_WAY
    closed = [any("fin" in words for words in side) for side in (requests, replies)]
    if any("rst" in words for words in every):
        return FlowState.CLOSED if protocol == Protocol.SCTP and any(closed) else FlowState.RESET
    if any(closed):
        return FlowState.CLOSED if all(closed) else FlowState.CLOSING
    return FlowState.OPEN if has_asked and has_replied else FlowState.OPENING
