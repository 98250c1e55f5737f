# SPDX-License-Identifier: Apache-2.0
"""When a flow has been idle for too long: a flow goes as a whole, by whichever entry was used last.

TCP's numbers are those that kube-proxy sets (kube-proxy.md 11.3), else conntrack's.
"""

from collections.abc import Iterable, Iterator

from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Flags
from ebpflb.plan.flows import Entries, Flow, Look, State, Tuple, gather, state

TCP = {
    State.OPENING: 60,  # nf_conntrack_tcp_timeout_syn_recv
    State.OPEN: 24 * 3600,  # kube-proxy's conntrack.tcpEstablishedTimeout
    State.CLOSING: 3600,  # kube-proxy's conntrack.tcpCloseWaitTimeout
    State.CLOSED: 30,  # nf_conntrack_tcp_timeout_last_ack: the last ACK may get lost
    State.RESET: 10,  # nf_conntrack_tcp_timeout_close
}
UDP = {State.ONE_WAY: 30, State.BOTH_WAYS: 180}  # conntrack's, _stream as it was before 5.0
SCTP = TCP | {State.OPEN: 300, State.CLOSING: 60}  # a heartbeat every 30 s (RFC 9260 16)
SECONDS = {Protocol.TCP: TCP, Protocol.UDP: UDP, Protocol.SCTP: SCTP}


def patience(protocol: Protocol, flags: Flags) -> int:
    """How long an entry with these flags may be idle before its flow is looked at, in ns.

    Whatever state a flow is in, an entry shows it in time: of two FINs each may be the second, and
    who was reset or has not spoken says so itself.
    """
    alone = state(protocol, [flags])
    return _nanoseconds(protocol, State.CLOSED if alone == State.CLOSING else alone)


def expired(suspects: Iterable[tuple[Tuple, Flow]], look: Look, now: int) -> Iterator[Entries]:
    """The flows of these entries that may go at this time, entries in the order of deletion."""
    for key, flow in suspects:
        entries = gather(key, flow, look)
        found = state(key.protocol, [entry.flags for entry in entries.values()])
        used = max(entry.last_seen for entry in entries.values())
        if now - used >= _nanoseconds(Protocol(key.protocol), found):
            yield entries


def _nanoseconds(protocol: Protocol, found: State) -> int:
    return SECONDS[protocol][found] * 1_000_000_000
