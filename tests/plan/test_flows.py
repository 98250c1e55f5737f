# SPDX-License-Identifier: Apache-2.0
"""The entries that belong to one flow, and the flow's state."""

import pytest

from ebpflb.entries.flows import (
    STREAM_AFTER,
    Entries,
    FlowState,
    chosen_port,
    connection_state,
    gather,
    state,
)
from ebpflb.model.services import Protocol
from tests.plan.flow_builders import ANSWER, SECOND, Made

KINDS = [
    Made(1),
    Made(1, changed=True),
    Made(1, masqueraded=True),
    Made(1, masqueraded=True, changed=True),
    Made(1, masqueraded=True, chosen=False),
    Made(1, Protocol.UDP, masqueraded=True),
]


@pytest.mark.parametrize("made", KINDS, ids=str)
def test_one_leads_to_all(made: Made) -> None:
    """From each entry all of the flow are found, the client's request first, and no other's."""
    entries = made.plain()
    store = entries | Made(2).plain() | Made(3, changed=True, masqueraded=True).plain()
    for key, flow in entries.items():
        assert list(gather(key, flow, store.get).items()) == list(entries.items())


CONNECTIONS = [
    ("request seen", "", FlowState.OPENING),
    ("request", "seen", FlowState.ANSWERED),
    ("request seen", "seen", FlowState.OPEN),
    ("request seen fin", "seen", FlowState.CLOSING),
    ("request seen", "seen fin", FlowState.CLOSING),
    ("request seen fin", "seen fin", FlowState.CLOSED),
    ("request seen rst", "", FlowState.RESET),
    ("request seen", "seen rst", FlowState.RESET),
]


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.SCTP])
@pytest.mark.parametrize(("asking", "replying", "expected"), CONNECTIONS)
def test_connections(protocol: Protocol, asking: str, replying: str, expected: FlowState) -> None:
    """A connection's state follows from who has been seen, who has closed and who has reset."""
    sides = [frozenset(asking.split()), frozenset(replying.split())]
    assert connection_state(protocol, sides) == expected


def lasting(made: Made, words: str, seconds: float) -> Entries:
    """UDP entries of a flow that was last used so long after its first packet."""
    entries = made.entries(["request seen", "request masquerade seen", words, words], [0] * 4)
    return {
        key: flow._replace(created=flow.last_seen - int(seconds * SECOND))
        for key, flow in entries.items()
    }


@pytest.mark.parametrize("masqueraded", [False, True])
def test_datagrams(masqueraded: bool) -> None:
    """UDP goes one way until a reply is seen; if it goes on for two seconds it is a stream."""
    made = Made(1, Protocol.UDP, masqueraded=masqueraded)
    for words, seconds, expected in (
        ("", STREAM_AFTER + 1, FlowState.ONE_WAY),
        ("seen", STREAM_AFTER, FlowState.BOTH_WAYS),
        ("seen", STREAM_AFTER + 0.001, FlowState.STREAM),
    ):
        assert state(Protocol.UDP, lasting(made, words, seconds).values()) == expected


@pytest.mark.parametrize("made", KINDS, ids=str)
def test_chosen_port(made: Made) -> None:
    """The node chose a masqueraded flow's port, else that of a client whose own was in use."""
    entries, has_snat = made.plain(), made.masqueraded and made.chosen
    keys = list(entries)
    expected = keys[ANSWER] if has_snat else keys[-1] if made.changed else None
    assert chosen_port(entries) == expected
