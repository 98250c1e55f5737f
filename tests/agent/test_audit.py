# SPDX-License-Identifier: Apache-2.0
"""Each difference from the plan is named and corrected, and nothing else waits for the audit."""

import errno
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.agent import audit
from ebpflb.agent.audit import Audit, Check, TableCheck
from ebpflb.errors import KernelError
from ebpflb.lab.agents import wait_until
from ebpflb.model.events import Disturbed, Drift, Kind, Part, in_force
from ebpflb.options import REPORT
from ebpflb.serve.conditions import not_ready
from tests.agent.fakes import Harness, changed, slices, value
from tests.agent.started import start
from tests.kit.clock import Clock

HOOK = Drift(Part.HOOK, "hook connect4", "is not attached")
PIN = Drift(Part.PIN, "map services", "has no pin")
FULL = KernelError("attaching", errno.ENOSPC, "No space left on device")


class FakeCheck(Check):
    """A check that finds the difference ``differs`` in one of ``size`` steps, until it is
    corrected.
    """

    name = "things"

    def __init__(self, size: int = 1) -> None:
        super().__init__(5.0)
        self.size = size
        self.differs: list[Drift] = []
        self.steps_taken = self.repairs = 0
        self.raised: KernelError | None = None

    def steps(self) -> Iterator[list[Drift]]:
        for step in range(self.size):
            self.steps_taken += 1
            yield list(self.differs) if step == self.size - 1 else []

    def repair(self) -> None:
        self.repairs += 1
        if self.raised:
            raise self.raised
        self.differs.clear()


def made(check: Check, *, report_only: bool = False) -> tuple[Audit, Clock, list[Drift]]:
    clock, told = Clock(step=0.001), list[Drift]()
    return Audit([check], told.extend, report_only=report_only, clock=clock), clock, told


def test_found_named_and_put_back() -> None:
    """A difference is reported once and corrected; the next comparison ends the drift."""
    check = FakeCheck()
    it, clock, told = made(check)
    check.differs = [HOOK]
    it.turn()
    assert (told, check.repairs, it.drift) == ([HOOK], 1, [HOOK])
    clock.now = it.due
    it.turn()
    assert (told, it.drift) == ([HOOK], [])
    assert it.due > clock() + 4


def test_turns_are_short() -> None:
    """A comparison of many steps takes many turns: the loop handles messages between them."""
    check = FakeCheck(size=100)
    it, clock, _ = made(check)
    turns = 0
    while not check.completed:
        before, turns = check.steps_taken, turns + 1
        clock.now = it.due
        it.turn()
        assert check.steps_taken - before <= audit.BUDGET_SECONDS / 0.001 + 1
        assert it.due > clock.now
    assert 9 <= turns < 100


def test_cannot_be_put_back(caplog: pytest.LogCaptureFixture) -> None:
    """The reason is reported once; the drift remains, and the correction is tried again."""
    check = FakeCheck()
    it, clock, _ = made(check)
    check.differs, check.raised = [HOOK], FULL
    for _ in range(3):
        it.turn()
        assert it.drift == [HOOK]
        assert it.errors == {"things": str(FULL)}
        clock.now = it.due
    assert check.repairs == 3
    assert sum(str(FULL) in each.getMessage() for each in caplog.records) == 1
    check.raised = None
    it.turn()
    clock.now = it.due
    it.turn()
    assert (it.drift, it.errors) == ([], {})


def test_a_link_without_pin_is_in_force() -> None:
    """A missing pin is drift, but the link serves as long as the agent runs."""
    assert in_force([PIN])
    assert not in_force([PIN, HOOK])


def test_told_everywhere(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """Drift is in the log, an event and the metrics; after the correction the node is ready again.
    Conntrack is searched for entries that came untranslated in the meantime.
    """
    start(harness, sync_period=0.01)
    wait_until("it is ready", lambda: harness.health.ready)
    searches = harness.stale.checks_of_untranslated
    harness.datapath.taken_off.append(HOOK)
    wait_until("it is put back", lambda: bool(harness.datapath.restored))
    assert any("hook connect4 is not attached" in each.getMessage() for each in caplog.records)
    assert harness.events == ["hook connect4 is not attached"]
    assert value(harness, "ebpflb_audit_drift_total", part="hook") == 1
    harness.wait_for(lambda status: not status.drift)
    assert harness.stale.checks_of_untranslated > searches
    wait_until("it is ready again", lambda: harness.health.ready and harness.health.serves)


def test_what_is_disturbed_is_looked_at_at_once() -> None:
    """After an event the check is due at once, but takes no more than its share of time."""
    check = FakeCheck(size=5)
    it, clock, told = made(check)
    it.turn()
    assert it.due > clock() + 4
    check.differs = [HOOK]
    it.take(Disturbed("things"))
    assert it.due < clock() + audit.SHARE * 0.02
    clock.now = it.due
    it.turn()
    assert told == [HOOK]
    it.take(Disturbed("no such check"))


class FakeNatWatch:
    """The members of NatWatch that TableCheck reads."""

    put_back = 0

    def __init__(self) -> None:
        self.lacking: list[str] = []
        self.differs: list[str] = []

    def take_differs(self) -> list[str]:
        taken, self.differs = self.differs, []
        return taken


def test_a_table_that_was_put_back_is_told() -> None:
    """The drift is reported once, even if the watch corrects it before the audit compares."""
    watch: Any = FakeNatWatch()
    it, clock, told = made(TableCheck(watch, 2.0))
    it.turn()
    watch.put_back = 1
    clock.now = it.due
    it.turn()
    assert [drift.part for drift in told] == [Part.TABLE]
    assert not in_force(told)
    clock.now = it.due
    it.turn()
    assert it.drift == []


def test_a_table_that_is_not_put_back_stays_drift() -> None:
    """With --audit=report the drift stays until someone makes the table again."""
    watch: Any = FakeNatWatch()
    it, clock, told = made(TableCheck(watch, 2.0), report_only=True)
    watch.lacking = ["chain choose is missing", "chain choose: rules were added or changed"]
    for _ in range(3):
        it.turn()
        clock.now = it.due
    assert len(told) == len(it.drift) == 2
    watch.lacking = []
    it.turn()
    assert it.drift == []


def test_an_agent_whose_state_directory_has_another_ends(harness: Harness) -> None:
    """An agent ends when another one has its state directory, and attaches or pins nothing over the
    other's.
    """
    start(harness, sync_period=0.01)
    harness.lock.others = harness.lock.lost = True
    harness.thread.join(60)
    assert not harness.thread.is_alive()
    assert harness.error is None
    assert not harness.datapath.restored


def test_not_in_force(harness: Harness) -> None:
    """A lasting difference fails /healthz and /readyz, and is in the status; the agent keeps
    running.
    """
    start(harness, sync_period=0.01, audit=REPORT)
    harness.datapath.taken_off.append(HOOK)
    status = harness.wait_for(lambda status: status.drift)
    assert status.drift == {"hook connect4": "is not attached"}
    assert not_ready(status) == ["not as planned: hook connect4: is not attached"]
    wait_until("it is unhealthy", lambda: not harness.health.serves)
    assert harness.health.healthy
    plans = len(harness.datapath.plans)
    harness.send(changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.7")))
    wait_until("events go on", lambda: len(harness.datapath.plans) > plans)
