# SPDX-License-Identifier: Apache-2.0
"""Deleted Services leave nothing: after a year an agent is as small as at the start."""

import gc
from collections.abc import Iterable
from dataclasses import replace
from types import FunctionType, MethodType, ModuleType

from ebpflb.plan import tables
from ebpflb.plan.desired import DesiredService
from tests.plan import histories
from tests.plan.builders import FIRST, RESTRICTED, SECOND, backend, desired, frontend
from tests.plan.node import PlannedNode

NOT_HELD = (type, ModuleType, FunctionType, MethodType)


def held_by(root: object) -> int:
    """Return how many elements are in the containers reachable from an object."""
    seen: dict[int, object] = {}
    todo, elements = [root], 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, NOT_HELD):
            continue
        seen[id(each)] = each
        elements += len(each) if isinstance(each, dict | list | set) else 0
        todo += gc.get_referents(each)
    return elements


def named(number: int) -> DesiredService:
    flags = RESTRICTED | tables.scheduler_flags("maglev")
    found = desired("", {frontend(1): flags}, [backend(each) for each in range(1, 4)])
    name = found.name._replace(namespace=f"tenant-{number}", service=f"web-{number}")
    return replace(found, name=name, source_ranges=(FIRST, SECOND))


def come_and_go(node: PlannedNode, numbers: Iterable[int]) -> int:
    """Add and delete Services; return what the planner holds afterwards."""
    for service in map(named, numbers):
        node.change({service.name: service})
        node.change({service.name: None})
        node.wait_for_quarantine()
    node.planner.take_removals()  # as the agent's loop does
    node.planner.changed.clear()
    node.planner.waiting.changed.clear()
    return held_by(node.planner)


def test_services_that_are_gone_leave_nothing() -> None:
    """The planner holds as much after forty deleted Services as after two."""
    with histories.small_tables():
        node = PlannedNode()
        after_two = come_and_go(node, range(2))
        assert come_and_go(node, range(2, 40)) == after_two
