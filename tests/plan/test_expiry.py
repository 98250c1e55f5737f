# SPDX-License-Identifier: Apache-2.0
"""Sweeps over random flows keep active flows complete, and delete idle flows completely."""

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from ebpflb.entries.flows import Entries, FlowKind, FlowState, Timeouts, chosen_port, state
from ebpflb.model.services import Protocol
from tests.load import scaled
from tests.plan.flow_builders import NOW, REPLY, REQUEST, SECOND, Made

# What the four entries of a flow may say in a state: request, masquerade, answer, reply.
SEEN = ("request seen", "request masquerade seen", "seen", "seen")
WORDS = {
    FlowState.OPENING: [
        ("request seen", "request masquerade seen", "", ""),
        ("request", "request masquerade", "", ""),
    ],
    FlowState.ANSWERED: [("request", "request masquerade", "seen", "seen")],
    FlowState.OPEN: [SEEN],
    FlowState.CLOSING: [
        ("request seen fin", "request masquerade seen fin", "seen", "seen"),
        ("request seen", "request masquerade seen", "seen fin", "seen fin"),
    ],
    FlowState.CLOSED: [("request seen fin", "request masquerade seen", "seen", "seen fin")],
    FlowState.RESET: [
        ("request seen", "request masquerade seen", "seen rst", "seen rst"),
        ("request seen rst", "request masquerade seen", "", ""),
    ],
    FlowState.ONE_WAY: [("request seen", "request masquerade seen", "", "")],
    FlowState.BOTH_WAYS: [SEEN, ("request", "request masquerade", "seen", "seen")],
    FlowState.STREAM: [SEEN],
}

# What any side may say as well, without a change of the state.
AND_ALSO = {(Protocol.TCP, FlowState.RESET): " fin", (Protocol.SCTP, FlowState.CLOSED): " rst"}


class Known(NamedTuple):
    """A flow, its state, and its remaining entries."""

    entries: Entries
    limit: int  # seconds
    complete: bool


CHOSEN = st.one_of(
    st.just(Timeouts()), st.builds(Timeouts, *[st.sampled_from([0, 1, 20, 60, 7200, 500_000])] * 4)
)


LIVING = (FlowState.OPEN, FlowState.CLOSING, FlowState.STREAM)


def _of_a_part(seconds: dict[FlowState, int]) -> int:
    """Return the shortest timeout for the remaining part of a flow.

    A part may look open, or closed, though the whole flow does not.
    """
    looks = (*LIVING, FlowState.OPENING, FlowState.CLOSED, FlowState.RESTING, FlowState.BOTH_WAYS)
    return min(seconds[state] for state in looks if state in seconds)


def begun(entries: Entries, state: FlowState) -> Entries:
    """Return when all entries were made: long enough ago for UDP streams, or not."""
    used = [flow.last_seen for flow in entries.values()]
    created = min(used) - 10 * SECOND if state is FlowState.STREAM else max(used) - SECOND
    return {key: flow._replace(created=created) for key, flow in entries.items()}


@st.composite
def flows(draw: st.DrawFn, number: int, timeouts: Timeouts) -> Known:
    protocol = draw(st.sampled_from(Protocol))
    state = draw(st.sampled_from([each for each in timeouts.seconds[protocol] if each in WORDS]))
    words = list(draw(st.sampled_from(WORDS[state])))
    if draw(st.booleans()) and (protocol, state) in AND_ALSO:
        words[draw(st.sampled_from([REQUEST, REPLY]))] += AND_ALSO[protocol, state]
    made = Made(number, protocol, *draw(st.tuples(*[st.booleans()] * 3)))
    if made.masqueraded:
        words[REQUEST] += " masquerade"
    limit = timeouts.seconds[protocol][state]
    near = st.sampled_from([0, limit // 2, limit - 1, limit, limit + 1, 3 * limit, 100_000])
    entries = begun(made.entries(words, draw(st.tuples(*[near] * 4))), state)
    evicted = draw(st.sampled_from([None, None, None, REQUEST, REPLY]))
    if evicted == REQUEST or (evicted == REPLY and not made.masqueraded):
        del entries[list(entries)[-1 if evicted == REPLY else REQUEST]]
        return Known(entries, min(limit, _of_a_part(timeouts.seconds[protocol])), False)
    return Known(entries, limit, True)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Timeouts, list[Known]]:
    timeouts = draw(CHOSEN)
    numbers = range(1, draw(st.integers(1, 6)) + 1)
    return timeouts, [draw(flows(number, timeouts)) for number in numbers]


def sweep(store: Entries, timeouts: Timeouts) -> None:
    """Expire the entries of a dict like ebpflb.kernel.sweep."""
    wait = timeouts.idle_limit
    limits = {key: wait(Protocol(key.protocol), flow.flags) for key, flow in store.items()}
    idle = [key for key, flow in store.items() if NOW - flow.last_seen >= limits[key]]
    candidates = ((key, store[key]) for key in idle if key in store)
    for flow in timeouts.expired(candidates, store.get, NOW):
        for key in flow.entries:
            store.pop(key, None)
        store.update(flow.rest)


@given(worlds())
@settings(max_examples=scaled(400), deadline=None)
def test_only_flows_older_than_the_timeout_go(drawn: tuple[Timeouts, list[Known]]) -> None:
    """With any timeouts, no entry is removed while an entry of its flow is younger than the
    timeout, all entries of an expired flow are removed, and a complete flow is removed once all its
    entries are that old.
    """
    timeouts, world = drawn
    store: Entries = {key: flow for known in world for key, flow in known.entries.items()}
    sweep(store, timeouts)
    for entries, limit, complete in world:
        left = [key for key in entries if key in store]
        if resting := [key for key in left if store[key].kind == FlowKind.RESTING]:
            assert left == resting == [chosen_port(entries)]
            assert state(left[0].protocol, [store[left[0]]]) is FlowState.RESTING
            continue
        due = all(NOW - flow.last_seen >= limit * SECOND for flow in entries.values())
        assert len(left) in (0, len(entries))
        assert due or left
        assert not (complete and due and left)


def test_masqueraded_by_the_cni() -> None:
    """A connection that the CNI masquerades counts as open like any other, however long it is
    idle.
    """
    limit = Timeouts().seconds[Protocol.TCP][FlowState.OPEN]
    made = Made(1, masqueraded=True, chosen=False)
    for ago, gone in ((limit - 1, False), (limit, True)):
        words = ("request masquerade seen", "request masquerade", "", "seen")
        store = made.entries(words, [ago] * 4)
        sweep(store, Timeouts())
        assert bool(store) is not gone
