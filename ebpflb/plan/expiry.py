# SPDX-License-Identifier: Apache-2.0
"""When a flow has been idle for too long. It is deleted as a whole; its latest entry counts.

Timeouts that the operator did not choose are kube-proxy's (kube-proxy.md 11.3), else conntrack's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Flags
from ebpflb.plan.flow_entries import Entries, Flow, FlowState, Look, Tuple, gather, state


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
            FlowState.OPENING: 60,  # nf_conntrack_tcp_timeout_syn_recv
            FlowState.OPEN: self.established or 24 * 3600,
            FlowState.CLOSING: self.close_wait or 3600,
            FlowState.CLOSED: 30,  # nf_conntrack_tcp_timeout_last_ack: the last ACK may get lost
            FlowState.RESET: 10,  # nf_conntrack_tcp_timeout_close
        }
        udp = {
            FlowState.ONE_WAY: self.udp or 30,
            FlowState.BOTH_WAYS: self.udp_stream or 180,  # conntrack's before 5.0
        }
        sctp = tcp | {
            FlowState.OPEN: 300,
            FlowState.CLOSING: 60,
        }  # a heartbeat every 30 s (RFC 9260 16)
        return {Protocol.TCP: tcp, Protocol.UDP: udp, Protocol.SCTP: sctp}

    def idle_limit(self, protocol: Protocol, flags: Flags) -> int:
        """How long an entry with these flags may be idle before its whole flow is read, in ns.

        Never longer than the flow's own timeout: of two FINs each may be the first or the second,
        and a side that has reset, or has sent nothing yet, shows it in its own entry.
        """
        found = state(protocol, [flags])
        whole_flow = {FlowState.CLOSED: FlowState.CLOSING}.get(found, found)
        return min(self._nanoseconds(protocol, each) for each in (found, whole_flow))

    def expired(
        self, candidates: Iterable[tuple[Tuple, Flow]], look: Look, now: int
    ) -> Iterator[Entries]:
        """The flows of these entries that have expired; their entries in the order of deletion."""
        for key, flow in candidates:
            entries = gather(key, flow, look)
            found = state(key.protocol, [entry.flags for entry in entries.values()])
            used = max(entry.last_seen for entry in entries.values())
            if now - used >= self._nanoseconds(Protocol(key.protocol), found):
                yield entries

    def _nanoseconds(self, protocol: Protocol, found: FlowState) -> int:
        return self.seconds[protocol][found] * 1_000_000_000
