# SPDX-License-Identifier: Apache-2.0
"""When a flow has been idle for too long. It is deleted as a whole; its latest entry counts.

Timeouts that the operator did not choose are kube-proxy's (kube-proxy.md 11.3), else conntrack's.
The programs have them too, in the map of timeouts: they take over the port of an idle flow.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import NamedTuple

from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Flags, Timeout, TimeoutKey
from ebpflb.plan.flow_entries import (
    STREAM_AFTER,
    Entries,
    Flow,
    FlowKind,
    FlowState,
    Look,
    Tuple,
    chosen_port,
    connection_state,
    datagrams_state,
    gather,
    state,
)

_PROTOCOLS = frozenset(Protocol)
KEPT = 120  # seconds: a flow that is open and was used so lately never loses its port to another
_OPEN = {FlowState.OPEN, FlowState.CLOSING, FlowState.STREAM}
_NO_FLAGS = frozenset[str]()


def _states() -> Iterator[tuple[TimeoutKey, FlowState]]:
    """Of a flow with a port that this node chose, by the flags of two of its entries."""
    words = ("seen", "fin", "rst")
    replies = [frozenset(some) for n in range(4) for some in combinations(words, n)]
    requests = [_NO_FLAGS, *(reply | {"request"} for reply in replies)]
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
    """A flow to be deleted: its entries in this order, and which of them is put back to rest."""

    entries: Entries
    resting: Tuple | None = None

    @property
    def rest(self) -> Entries:
        """What is left of the flow: nothing, or what keeps its port."""
        if self.resting is None:
            return {}
        former = self.entries[self.resting]
        return {self.resting: former._replace(kind=FlowKind.RESTING, flags=former.flags | {"fin"})}


@dataclass(frozen=True)
class Timeouts:
    """In seconds; 0: the default."""

    established: int = 0
    close_wait: int = 0
    udp: int = 0
    udp_stream: int = 0

    @cached_property
    def seconds(self) -> dict[Protocol, dict[FlowState, int]]:
        """By the state that a flow is in."""
        tcp = {
            FlowState.OPENING: 5,  # a client that goes on tries again, and opens another flow
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
            FlowState.RESTING: 30,  # as CLOSED: SCTP has no TIME_WAIT
        }  # a heartbeat every 30 s (RFC 9260 16)
        return {Protocol.TCP: tcp, Protocol.UDP: udp, Protocol.SCTP: sctp}

    @property
    def settings(self) -> dict[str, int]:
        """The fields of the map of settings."""
        return {"stream_after": STREAM_AFTER}

    @cached_property
    def table(self) -> dict[TimeoutKey, Timeout]:
        """The entries of map timeouts: when the programs may take over the port of a flow."""
        return {
            key: Timeout(self.seconds[Protocol(key.protocol)][found], KEPT if found in _OPEN else 0)
            for key, found in _states()
        }

    def idle_limit(self, protocol: Protocol, flags: Flags) -> int:
        """How long an entry with these flags may be idle before its whole flow is read, in ns.

        Never longer than the flow's own timeout: of two FINs each may be the first or the second,
        and a side that has reset, or has sent nothing yet, shows it in its own entry.
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
        """The flows of these entries that have expired; their entries in the order of deletion."""
        for key, flow in candidates:
            entries = gather(key, flow, look)
            if key.protocol not in _PROTOCOLS:  # no program has written it
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
