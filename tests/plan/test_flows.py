# SPDX-License-Identifier: Apache-2.0
"""The entries that belong to one flow, and the flow's state."""

import pytest

from ebpflb.entries.flows import (
    STREAM_AFTER,
    Entries,
    FlowKind,
    FlowState,
    chosen_port,
    connection_state,
    datagrams_state,
    gather,
    state,
)
from ebpflb.model.services import Protocol
from tests.plan.flow_builders import ANSWER, MASQUERADE, REPLY, REQUEST, SECOND, Made

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


@pytest.mark.parametrize("part", [REQUEST, REPLY])
def test_evicted(part: int) -> None:
    """The remaining entries of a flow are joined, without the request's or the reply's too."""
    entries = Made(1, masqueraded=True).plain()
    del entries[list(entries)[part]]
    key, flow = next(iter(entries.items()))
    assert gather(key, flow, entries.get) == entries


def test_nothing_between() -> None:
    """An entry to which nothing leads any more stands alone."""
    entries = Made(1, masqueraded=True).plain()
    keys = list(entries)
    answer, flow = keys[ANSWER], entries[keys[ANSWER]]
    del entries[keys[MASQUERADE]]
    assert gather(answer, flow, entries.get) == {answer: flow}
    assert answer not in gather(keys[REQUEST], entries[keys[REQUEST]], entries.get)


def test_replaced() -> None:
    """A request whose way back a newer flow has taken stands alone, and is no part of that."""
    entries = Made(1).plain()
    (asked, request), (replied, reply) = entries.items()
    newer = asked._replace(destination=asked.destination + 5)
    store = {**entries, newer: request, replied: reply._replace(address=newer.destination)}
    assert gather(asked, request, store.get) == {asked: request}
    assert list(gather(replied, store[replied], store.get)) == [newer, replied]


def test_chosen_again() -> None:
    """The way back from a backend that the client no longer has stands alone."""
    entries = Made(1, Protocol.UDP).plain()
    (asked, request), (replied, reply) = entries.items()
    store = {**entries, asked: request._replace(address=request.address + 1)}
    assert gather(replied, reply, store.get) == {replied: reply}


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


def test_masqueraded_twice() -> None:
    """If the CNI masquerades a flow first, its masquerade's entries stay unseen, but it is open."""
    words = ["request seen", "request masquerade", "", "seen"]
    assert (
        connection_state(Protocol.TCP, [frozenset(each.split()) for each in words])
        == FlowState.OPEN
    )
    sides = [frozenset(each.split()) for each in words]
    assert datagrams_state(sides, is_stream=False) == FlowState.BOTH_WAYS


def test_shut_down() -> None:
    """A reset after a FIN in TCP corresponds to the end of an orderly shutdown in SCTP."""
    sides = [frozenset({"request", "seen", "fin", "rst"}), frozenset({"seen"})]
    assert connection_state(Protocol.TCP, sides) == FlowState.RESET
    assert connection_state(Protocol.SCTP, sides) == FlowState.CLOSED


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


def test_only_a_port_is_left() -> None:
    """A connection of which only the entry with its masquerade port is left is over."""
    entries = Made(1, masqueraded=True).plain()
    key = list(entries)[ANSWER]
    assert state(Protocol.TCP, [entries[key]]) == FlowState.RESTING
    resting = entries[key]._replace(kind=FlowKind.RESTING)
    others: Entries = {}
    assert gather(key, resting, others.get) == {key: resting}
    assert state(Protocol.TCP, [resting]) == FlowState.RESTING


@pytest.mark.parametrize("made", KINDS, ids=str)
def test_chosen_port(made: Made) -> None:
    """The node chose a masqueraded flow's port, else that of a client whose own was in use."""
    entries, has_snat = made.plain(), made.masqueraded and made.chosen
    keys = list(entries)
    expected = keys[ANSWER] if has_snat else keys[-1] if made.changed else None
    assert chosen_port(entries) == expected


def test_unknown() -> None:
    """The content of an evicted entry is not guessed: the flow counts as open."""
    request = frozenset({"request", "seen"})
    assert connection_state(Protocol.TCP, [request]) == FlowState.OPEN
    assert datagrams_state([request], is_stream=False) == FlowState.BOTH_WAYS
