# SPDX-License-Identifier: Apache-2.0
"""Connections as the kernel's conntrack keeps them: what is translated, and how they stand."""

from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Frontend
from ebpflb.plan.flow_entries import FlowState

# enum ip_conntrack_status of include/uapi/linux/netfilter/nf_conntrack_common.h
STATUS = {
    "expected": 1 << 0,
    "seen-reply": 1 << 1,
    "assured": 1 << 2,
    "confirmed": 1 << 3,
    "source-nat": 1 << 4,
    "destination-nat": 1 << 5,
    "offload": 1 << 14,
}
SEEN_REPLY, DESTINATION_NAT = STATUS["seen-reply"], STATUS["destination-nat"]

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
_FLOW_STATES = {
    "established": FlowState.OPEN,
    "fin-wait": FlowState.CLOSING,
    "close-wait": FlowState.CLOSING,
    "last-ack": FlowState.CLOSED,
    "time-wait": FlowState.CLOSED,
    "close": FlowState.RESET,
}


class Ends(NamedTuple):
    """Source and destination of the packets of one direction."""

    source: Address
    destination: Address
    source_port: int
    destination_port: int

    def reversed(self) -> "Ends":
        return Ends(self.destination, self.source, self.destination_port, self.source_port)


class StaleCandidates(NamedTuple):
    """Connections to a frontend that may be stale: all, or only those that ``backend`` answers.

    ``backend`` is an address and a port. As of a NodePort's frontend, an unspecified address means
    any.
    """

    frontend: Frontend
    backend: tuple[Address, int] | None


class Connection(NamedTuple):
    """One entry. The client sends ``original``, and the backend answers it by ``reply``.

    Without NAT each is the other the other way round. ``reply.source`` is the backend, and
    ``reply.destination`` the client, or the address and port that it is masqueraded with.
    """

    protocol: Protocol
    original: Ends
    reply: Ends
    status: int = 0  # of STATUS
    seconds: int = 0  # until it times out
    tcp_state: int = 0  # an index of TCP_STATES
    mark: int = 0
    identity: bytes = b""  # attributes that tell the kernel which entry this is, for its deletion

    @property
    def is_translated(self) -> bool:
        """Whether its requests get another destination."""
        return bool(self.status & DESTINATION_NAT)

    @property
    def state(self) -> FlowState:
        """In the words of flows; conntrack's own are ``state_name``."""
        if self.protocol == Protocol.TCP:
            return _FLOW_STATES.get(self.state_name, FlowState.OPENING)
        return FlowState.BOTH_WAYS if self.status & SEEN_REPLY else FlowState.ONE_WAY

    @property
    def state_name(self) -> str:
        """conntrack's name of the TCP state, or "replied" and "unreplied"."""
        if self.protocol == Protocol.TCP:
            return TCP_STATES[self.tcp_state] if self.tcp_state < len(TCP_STATES) else "unknown"
        return "replied" if self.status & SEEN_REPLY else "unreplied"
