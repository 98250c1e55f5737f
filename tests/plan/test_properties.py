# SPDX-License-Identifier: Apache-2.0
"""A look-up that succeeds before and after an update succeeds during it. A crash between any two
writes leaves a working state. PlannedNode checks everything after each write.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings

from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName
from ebpflb.plan import tables
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.desired import DesiredBackend
from ebpflb.plan.planner import Plan
from tests.load import scaled
from tests.plan import histories
from tests.plan.builders import CLIENTS
from tests.plan.histories import Step
from tests.plan.node import PlannedNode, check_tidy, from_nothing
from tests.plan.simulation import Maps, writes

Endpoint = tuple[Address, int]
TIGHT = Capacity(services=7, slots=12, service_ids=5, backend_ids=14, source_ranges=4, choices=30)


@pytest.fixture(autouse=True, scope="module")
def small_tables() -> Iterator[None]:
    """Make tables small, because each place is looked up after each write."""
    with histories.small_tables():
        yield


@given(histories.steps)
@settings(max_examples=scaled(150), deadline=None)
def test_history_does_not_matter(steps: list[Step]) -> None:
    """After any history the maps equal those written from nothing for the same services."""
    node = PlannedNode()
    for step in steps:
        histories.run(node, [step])
        assert node.maps.view() == from_nothing(node).view()
        check_tidy(node)


@given(histories.steps)
@settings(max_examples=scaled(60), deadline=None)
def test_warm_restart_writes_nothing(steps: list[Step]) -> None:
    """A restart with correct maps writes nothing."""
    node = PlannedNode()
    histories.run(node, steps)
    node.wait_for_quarantine()
    assert not node.restart()
    check_tidy(node)


@given(histories.steps)
@settings(max_examples=scaled(100), deadline=None)
def test_crash_anywhere(steps: list[Step]) -> None:
    """After a crash between any two writes, one complete plan repairs everything."""
    node = PlannedNode()
    histories.run(node, steps[:-1])
    before, clients = node.maps.copy(), set(node.clients)
    node.wait(steps[-1].seconds)
    plan = node.change(histories.changes(node, steps[-1].edits))
    desired = from_nothing(node).view()
    for crashed in crashes(before, plan):
        crashed.desired, crashed.clients = node.desired, set(clients)
        crashed.restart()
        assert crashed.maps.view() == desired
        check_tidy(crashed)
        crashed.wait_for_quarantine()
        assert not crashed.restart()


@given(histories.steps_with_crashes)
@settings(max_examples=scaled(150), deadline=None)
def test_no_pair_of_ids_comes_twice(steps: list[Step]) -> None:
    """Clients, sockets and flows remember the ids of a service and a backend. While some ids are
    unused, no pair of ids stands for two endpoints, even if agents end between any two writes.
    """
    node, seen = PlannedNode(), dict[tuple[int, int], tuple[PortName, Endpoint]]()
    for step in steps:
        node.wait(step.seconds)
        node.change(histories.changes(node, step.edits), step.crash)
        note_pairs(node, seen)
        node.restart()
        note_pairs(node, seen)


def note_pairs(node: PlannedNode, seen: dict[tuple[int, int], tuple[PortName, Endpoint]]) -> None:
    """Compare each pair in the maps with its first occurrence."""
    for pair, backend in node.maps.live_backends().items():
        found = node.maps.service_names[pair[0]], (backend.address, backend.port)
        assert seen.setdefault(pair, found) == found


def crashes(maps: Maps, plan: Plan) -> Iterator[PlannedNode]:
    """Yield a node for each number of writes, with the entries written until then."""
    rows = list(writes(plan))
    for stop in range(len(rows) + 1):
        crashed = PlannedNode()
        crashed.maps = maps.copy()
        for part, row in rows[:stop]:
            crashed.maps.write(part, row)
        yield crashed


@given(histories.steps_with_crashes)
@settings(max_examples=scaled(150), deadline=None)
def test_crash_after_crash(steps: list[Step]) -> None:
    """Crashes during a repair are repaired too."""
    node = PlannedNode()
    histories.run(node, steps)
    assert node.maps.view() == from_nothing(node).view()
    check_tidy(node)
    node.wait_for_quarantine()
    assert not node.restart()


@given(histories.steps)
@settings(max_examples=scaled(150), deadline=None)
def test_full_maps(steps: list[Step]) -> None:
    """With full maps every service is as desired, or keeps the part that it still wants.

    Otherwise its endpoints stay unchanged. No service waits that would fit.
    """
    node = PlannedNode(TIGHT)
    for step in steps:
        before = {name: entries.backends for name, entries in node.planner.actual.items()}
        histories.run(node, [step])
        _check_full(node, before)
        _check_nobody_slips_in(node)
        check_tidy(node)
    node.wait_for_quarantine()
    while node.planner.retry_due < node.now:
        node.change({})
    for name in node.not_programmed:
        assert (lack := node.planner.waiting.lack(name))
        assert node.planner.space.lack(name, lack.part, lack.more) or "in a row" in lack.reason
    check_tidy(node)


def _check_full(node: PlannedNode, before: Mapping[PortName, Sequence[DesiredBackend]]) -> None:
    """Check the service ports; ``before`` has the former backends of each."""
    desired, view = from_nothing(node).view(), node.maps.view()
    for frontend, owner in node.planner.frontends.owners.items():
        if owner in node.not_programmed:
            had, now = before.get(owner, ()), node.planner.actual[owner].backends
            assert now == had or _is_what_fits(now, had, node.desired[owner].backends)
            assert _for_any_endpoint(view[frontend]) == _for_any_endpoint(desired[frontend])
        else:
            assert view[frontend] == desired[frontend]


def _for_any_endpoint(seen: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the flags without affinity, and without the scheduler, because its table may be
    missing.
    """
    flags, affinity_seconds, *_ = seen
    return tables.at_random(flags) - {"even"}, affinity_seconds


def _is_what_fits(*lists: Sequence[DesiredBackend]) -> bool:
    """Whether a port has all of its former entries that are still wanted, and no others."""
    now, had, wanted = ({each.endpoint for each in backends} for backends in lists)
    return had & wanted <= now <= wanted


def _check_nobody_slips_in(node: PlannedNode) -> None:
    """Check that a service without room for all of its clients admits no others."""
    desired = from_nothing(node)
    for frontend, owner in node.planner.frontends.owners.items():
        found = desired.services.get(frontend)
        if found and desired.service_names[found.id] == owner:
            for client in CLIENTS:
                assert node.maps.admitted(frontend, client) <= desired.admitted(frontend, client)


@given(histories.steps_with_crashes)
@settings(max_examples=scaled(150), deadline=None)
def test_crash_of_full_maps(steps: list[Step]) -> None:
    """Full maps and crashes together break no look-up, and leave nothing behind."""
    node = PlannedNode(TIGHT)
    histories.run(node, steps)
    check_tidy(node)
