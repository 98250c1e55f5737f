# SPDX-License-Identifier: Apache-2.0
"""A new endpoint's weight grows from a tenth to the whole weight; other weights stay."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import Range
from ebpflb.model.endpoints import finished
from ebpflb.model.services import PortName
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.service_entries import (
    NO_ENTRIES,
    SLOTS_PER_TURN,
    TURN_SECONDS,
    ServiceEntries,
    SlowStarts,
    service_entries,
)
from tests.plan.builders import desired, name

SECONDS = 30.0


def applied(starts: SlowStarts, *about: Any) -> DesiredService:
    return finished(starts.applying(*about))


def weights(found: DesiredService) -> dict[int, int]:
    """Return the weights by the last number of the address."""
    return {int(str(each.address).rpartition(".")[2]): each.weight for each in found.backends}


class Node:
    """Successive agents, and the maps that each leaves to the next one."""

    def __init__(self) -> None:
        self.programmed = NO_ENTRIES
        self.restart()

    def restart(self) -> None:
        self.starts = SlowStarts()

    def apply(self, now: float, *numbers: int, seconds: float = SECONDS) -> dict[int, int]:
        found = finished(
            self.starts.applying(desired("web", [1], numbers), seconds, self.programmed, now)
        )
        ids = tuple(range(1, len(found.backends) + 1))
        block = Range(0, len(ids))
        self.programmed = service_entries(1, found, found.frontends, block, ids)
        return weights(found)


def test_a_new_endpoint_grows_from_a_tenth_to_whole() -> None:
    """A new endpoint's weight grows by a tenth at each due time, until it is whole."""
    node = Node()
    node.apply(0.0, 1)
    met = [node.apply(100.0, 1, 2)[2]]
    while node.starts.due < math.inf:
        now = node.starts.due
        assert node.starts.take_due({}, now) == [name("web")]
        met.append(node.apply(now, 1, 2)[2])
        assert node.apply(now, 1, 2)[1] == 100
    assert met == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert math.isclose(now, 100.0 + SECONDS, abs_tol=1e-6)


@given(some.floats(0, SECONDS - 1))
def test_a_restart_goes_on_from_the_weight_in_the_maps(age: float) -> None:
    """After a restart weights grow on from those in the maps; whole weights stay whole."""
    node = Node()
    node.apply(0.0, 1)
    node.apply(0.0, 1, 2)
    before = node.apply(age, 1, 2)
    node.restart()
    assert node.apply(1e6, 1, 2) == before
    assert node.starts.due <= 1e6 + SECONDS / 9 + 1e-6
    assert node.apply(1e6 + SECONDS + 1e-6, 1, 2) == {1: 100, 2: 100}


def test_what_is_rewritten_is_budgeted() -> None:
    """A turn rewrites a limited number of slots, but at least one service port.

    The remaining service ports follow in later turns.
    """
    starts = SlowStarts()
    names = [f"web-{number}" for number in range(5)]
    size = SLOTS_PER_TURN // 2
    cost: dict[PortName, ServiceEntries] = {
        name(each): NO_ENTRIES._replace(block=Range(0, size)) for each in names
    }
    for each in names:
        applied(starts, desired(each, [1], [1]), SECONDS, NO_ENTRIES, 0.0)
        applied(starts, desired(each, [1], [1, 2]), SECONDS, NO_ENTRIES, 0.0)
    now, met = SECONDS, list[PortName]()
    while len(met) < len(names):
        turn = starts.take_due(cost, now)
        assert 1 <= len(turn) <= 2
        assert starts.take_due(cost, now) == []
        for found in turn:
            applied(starts, desired(found.service, [1], [1, 2]), SECONDS, NO_ENTRIES, now)
        met += turn
        now += TURN_SECONDS
    assert sorted(each.service for each in met) == names
    assert starts.due == math.inf
