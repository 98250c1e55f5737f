# SPDX-License-Identifier: Apache-2.0
"""How a connection of conntrack stands, in the words of flows."""

from ipaddress import ip_address

import pytest

from ebpflb.entries.flows import (
    TCP_STATES,
    Connection,
    Ends,
    FlowState,
)
from ebpflb.model.services import Protocol

CLIENT, VIP, BACKEND = map(ip_address, ("198.51.100.7", "10.96.0.10", "10.244.1.11"))
REQUEST, REPLY = Ends(CLIENT, VIP, 3001, 80), Ends(BACKEND, CLIENT, 8080, 3001)
TCP = Connection(Protocol.TCP, REQUEST, REPLY)
UDP = Connection(Protocol.UDP, REQUEST, REPLY)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("none", FlowState.OPENING),
        ("syn-sent", FlowState.OPENING),
        ("syn-recv", FlowState.OPENING),
        ("established", FlowState.OPEN),
        ("fin-wait", FlowState.CLOSING),
        ("close-wait", FlowState.CLOSING),
        ("last-ack", FlowState.CLOSED),
        ("time-wait", FlowState.CLOSED),
        ("close", FlowState.RESET),
        ("syn-sent2", FlowState.OPENING),
    ],
)
def test_tcp(name: str, state: FlowState) -> None:
    """Each of conntrack's states is one of a flow's."""
    found = TCP._replace(tcp_state=TCP_STATES.index(name))
    assert (found.state_name, found.state) == (name, state)
