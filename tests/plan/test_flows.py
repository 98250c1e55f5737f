# SPDX-License-Identifier: Apache-2.0
"""Which entries are one flow, and how it stands."""

import pytest

from ebpflb.model.services import Protocol
from ebpflb.plan.flow_entries import FlowState, gather, state
from tests.plan.flow_builders import ANSWER, MASQUERADE, REPLY, REQUEST, Made

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
    """What the LRU has left finds each other, be the request gone or the reply."""
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
    ("request", "seen", FlowState.OPENING),
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
    assert state(protocol, sides) == expected


def test_masqueraded_twice() -> None:
    """Where the CNI masquerades what we would, our entries for it are never seen: it is open."""
    words = ["request seen", "request masquerade", "", "seen"]
    assert state(Protocol.TCP, [frozenset(each.split()) for each in words]) == FlowState.OPEN
    assert state(Protocol.UDP, [frozenset(each.split()) for each in words]) == FlowState.BOTH_WAYS


def test_shut_down() -> None:
    """What is a reset after a FIN in TCP is the end of an orderly shutdown in SCTP."""
    sides = [frozenset({"request", "seen", "fin", "rst"}), frozenset({"seen"})]
    assert state(Protocol.TCP, sides) == FlowState.RESET
    assert state(Protocol.SCTP, sides) == FlowState.CLOSED


def test_datagrams() -> None:
    """UDP goes one way until an answer has been seen."""
    request = frozenset({"request", "seen"})
    assert state(Protocol.UDP, [request, frozenset()]) == FlowState.ONE_WAY
    assert state(Protocol.UDP, [request, frozenset({"seen"})]) == FlowState.BOTH_WAYS


def test_unknown() -> None:
    """What an evicted entry would have said is not guessed: the flow counts as open."""
    request = frozenset({"request", "seen"})
    assert state(Protocol.TCP, [request]) == FlowState.OPEN
    assert state(Protocol.UDP, [request]) == FlowState.BOTH_WAYS
