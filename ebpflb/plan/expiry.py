# SPDX-License-Identifier: Apache-2.0
"""When a flow has been idle for too long: a flow goes as a whole, by whichever entry was used last.

What the operator did not choose is what kube-proxy sets (kube-proxy.md 11.3), else conntrack's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Flags
from ebpflb.plan.flow_entries import Entries, Flow, FlowState, Look, Tuple, gather, state


@dataclass(frozen=True)
class Timeouts:
    """In seconds; 0 chooses nothing."""

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

    def patience(self, protocol: Protocol, flags: Flags) -> int:
        """How long an entry with these flags may be idle before its flow is looked at, in ns.

        Whatever state a flow is in, an entry shows it in time: of two FINs each may be the second,
        and who was reset or has not spoken says so itself.
        """
        found = state(protocol, [flags])
        alike = {FlowState.CLOSING: FlowState.CLOSED}.get(found, found)
        return min(self._nanoseconds(protocol, each) for each in (found, alike))

    def expired(
        self, suspects: Iterable[tuple[Tuple, Flow]], look: Look, now: int
    ) -> Iterator[Entries]:
        """The flows of these entries that may go at this time, entries in the order of deletion."""
        for key, flow in suspects:
            entries = gather(key, flow, look)
            found = state(key.protocol, [entry.flags for entry in entries.values()])
            used = max(entry.last_seen for entry in entries.values())
            if now - used >= self._nanoseconds(Protocol(key.protocol), found):
                yield entries

    def _nanoseconds(self, protocol: Protocol, found: FlowState) -> int:
        return self.seconds[protocol][found] * 1_000_000_000
