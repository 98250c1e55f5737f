# SPDX-License-Identifier: Apache-2.0
"""A large service port's slots are written in parts, before the plan that needs them."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings

from ebpflb.model import endpoints
from ebpflb.plan import planner
from tests.load import scaled
from tests.plan import histories
from tests.plan.builders import CAPACITY, by_name, desired, name
from tests.plan.histories import Step
from tests.plan.node import PlannedNode, check_tidy, from_nothing


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    """Make parts small, so that two endpoints need many of them."""
    with (
        histories.small_tables(),
        patch.object(endpoints, "IN_A_STEP", 1),
        patch.object(planner, "IN_A_STEP", 1),
    ):
        yield


@given(histories.steps)
@settings(max_examples=scaled(150), deadline=None)
def test_what_is_written_ahead_changes_nothing(history: list[Step]) -> None:
    """Slots written ahead have no effect until their plan, which may come after other changes;
    afterwards none is left over.
    """
    node = PlannedNode()
    for seconds, edits, _ in history:
        node.wait(seconds)
        first = histories.changes(node, edits[:1])
        for port in filter(None, first.values()):
            node.prepare(port)
        others = histories.changes(node, [it for it in edits[1:] if name(it.service) not in first])
        node.change(others)
        node.change(first)
        assert node.maps.view() == from_nothing(node).view()
        check_tidy(node)
    node.wait_for_quarantine()
    assert not node.restart()
    check_tidy(node)


@given(histories.steps)
@settings(max_examples=scaled(60), deadline=None)
def test_a_crash_before_the_plan(history: list[Step]) -> None:
    """The next agent frees the slots that were written ahead."""
    node = PlannedNode()
    histories.run(node, history[:-1])
    for port in filter(None, histories.changes(node, history[-1].edits).values()):
        node.prepare(port)
    node.restart()
    node.wait_for_quarantine()
    check_tidy(node)
    assert node.maps.view() == from_nothing(node).view()


def test_a_plan_writes_no_slot_again() -> None:
    """The plan only switches the frontends to the slots that were written ahead."""
    node = PlannedNode()
    node.change(by_name(desired("a", [1], [1, 2, 3])))
    changed = desired("a", [1], [2, 3, 4])
    node.prepare(changed)
    plan = node.change(by_name(changed))
    assert plan.services and not (plan.slots or plan.backend_slots or plan.translations)
    check_tidy(node)


def test_a_new_service_without_a_frontend_leaves_nothing() -> None:
    """If an older Service has the only frontend, the slots written ahead are freed."""
    node = PlannedNode()
    node.change(by_name(desired("a", [1], [1], created="2024")))
    later = desired("b", [1], [1, 2, 3], created="2025")
    node.prepare(later)
    node.change(by_name(later))
    node.wait_for_quarantine()
    check_tidy(node)
    assert node.planner.slots.available == CAPACITY.slots - 1


def test_many_removed_backends_are_freed_a_few_at_a_time() -> None:
    """One plan frees MOST_FREED of the removed backends, and the next plan is due at once."""
    node = PlannedNode()
    with patch.object(planner, "MOST_FREED", 2):
        node.change(by_name(desired("a", [1], range(1, 6))))
        assert len(node.change({name("a"): None}).removed_backend_slots) == 2
        assert node.planner.retry_due < node.now
        assert len(node.change({}).removed_backend_slots) == 2
        assert len(node.change({}).removed_backend_slots) == 1
    assert node.planner.retry_due > node.now
    node.wait_for_quarantine()
    check_tidy(node)


def test_a_change_of_frontends_keeps_what_is_written_ahead() -> None:
    """The slots stay although an older Service takes one of the frontends before the plan."""
    node = PlannedNode()
    node.change(by_name(desired("a", [1, 2], [1, 2, 3], created="2025")))
    changed = desired("a", [1, 2], [2, 3, 4], created="2025")
    node.prepare(changed)
    node.change(by_name(desired("b", [2], [7], created="2024")))
    plan = node.change(by_name(changed))
    assert plan.services and not plan.slots
    check_tidy(node)
    assert replace(changed, frontends={}).backends == node.planner.actual[name("a")].backends
