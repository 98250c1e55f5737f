# SPDX-License-Identifier: Apache-2.0
"""What is planned is what a fresh list says; what differs is named, and listed anew."""

from collections.abc import Set
from dataclasses import replace

import pytest
from msgspec import structs

from ebpflb.agent import objects_check
from ebpflb.errors import ClusterError
from ebpflb.lab.agents import wait_until
from ebpflb.model.events import Key, Kind, Replaced
from ebpflb.options import REPORT
from ebpflb.plan.entries import BackendName
from tests.agent.fakes import Harness, listed, service, slices, value
from tests.agent.started import NODES, SERVICES, SLICES, start

A = Key("default", "a")
PERIOD = 0.02


class FakeList:
    """The objects of ``says``; when it is distrusted the agent gets them."""

    restarting = False

    def __init__(self, says: Replaced) -> None:
        self.kind, self.says = says.kind, says
        self.begun = self.distrusted = 0
        self.since: Set[Key] | None = frozenset()
        self.error: ClusterError | None = None
        self.knows_versions = True

    def begin(self) -> bool:
        self.begun += 1
        self.pages = [self.says.objects, {}] if self.says.objects else [{}]
        self.waits = True
        return self.knows_versions

    def page(self) -> object:
        self.waits = not self.waits
        if self.error:
            raise self.error
        return self.pages.pop(0) if self.waits else None

    def changed(self) -> Set[Key] | None:
        return self.since

    def distrust(self) -> None:
        self.distrusted += 1

    def end(self) -> None:
        pass


@pytest.fixture
def lists(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> dict[Kind, FakeList]:
    """The agent's own objects are listed, every fifth of a second."""
    monkeypatch.setattr(objects_check, "SECONDS_PER_OBJECT", 0.0)
    found = {each.kind: FakeList(each) for each in (SERVICES, SLICES, NODES)}
    harness.source.fresh = list(found.values())
    harness.options = replace(harness.options, sync_period=PERIOD)
    return found


def compared(lists: dict[Kind, FakeList], times: int = 2) -> None:
    """That many more comparisons have ended, or one less."""
    before = lists[Kind.SERVICE].begun
    wait_until("they have", lambda: lists[Kind.SERVICE].begun > before + times)


def test_what_agrees_is_no_drift(harness: Harness, lists: dict[Kind, FakeList]) -> None:
    """Again and again, and nothing is listed anew."""
    start(harness)
    compared(lists, 3)
    assert harness.events == []
    assert not any(each.distrusted for each in lists.values())


def test_nothing_is_listed_at_the_start(harness: Harness, lists: dict[Kind, FakeList]) -> None:
    """The sources have just been listed, by every agent of a rollout at once."""
    harness.options = replace(harness.options, sync_period=60.0)
    start(harness)
    harness.wait_for(lambda status: status.in_sync)
    assert lists[Kind.SERVICE].begun == 0


@pytest.mark.parametrize(
    ("says", "named"),
    [
        (
            listed(Kind.SERVICE, service("a", "10.96.0.9")),
            "Service default/a is known",
        ),
        (listed(Kind.SERVICE), "Service default/a is known to the agent and not there any more"),
        (listed(Kind.ENDPOINT_SLICE), "EndpointSlice default/a"),
        (
            listed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.77")),
            "EndpointSlice default/a",
        ),
    ],
    ids=["changed", "gone", "slice gone", "slice changed"],
)
def test_what_the_watch_has_not_told_is_named_and_listed_anew(
    harness: Harness, lists: dict[Kind, FakeList], says: Replaced, named: str
) -> None:
    """In log, status, metrics and an event; it is over when the new list has been applied."""
    start(harness)
    fresh = lists[says.kind]
    fresh.says = says
    wait_until("it is listed anew", lambda: bool(fresh.distrusted))
    assert any(named in each for each in harness.events)
    assert harness.wait_for(lambda status: status.drift)
    assert value(harness, "ebpflb_audit_drift_total", part="object") >= 1
    harness.send(says)
    harness.wait_for(lambda status: not status.drift)


def test_an_object_that_is_missing_is_named(harness: Harness, lists: dict[Kind, FakeList]) -> None:
    """A Service whose event was lost."""
    start(harness)
    more = listed(Kind.SERVICE, service("b", "10.96.0.2")).objects
    lists[Kind.SERVICE].says = Replaced(Kind.SERVICE, {**SERVICES.objects, **more})
    wait_until("it is named", lambda: bool(harness.events))
    assert harness.events == ["Service default/b is not known to the agent"]


@pytest.mark.parametrize("since", [None, {A}], ids=["listed anew", "told"])
def test_what_has_changed_meanwhile_is_no_drift(
    harness: Harness, lists: dict[Kind, FakeList], since: Set[Key] | None
) -> None:
    """The watch has told of it after the version of the list."""
    start(harness)
    fresh = lists[Kind.SERVICE]
    fresh.since, fresh.says = since, listed(Kind.SERVICE, service("a", "10.96.0.9"))
    compared(lists, 3)
    assert harness.events == []


def test_report_only_lists_nothing_anew(harness: Harness, lists: dict[Kind, FakeList]) -> None:
    """With --audit=report it is told and stays."""
    harness.options = replace(harness.options, audit=REPORT)
    start(harness)
    lists[Kind.SERVICE].says = listed(Kind.SERVICE)
    harness.wait_for(lambda status: status.drift)
    compared(lists)
    assert lists[Kind.SERVICE].distrusted == 0


def test_a_server_that_cannot_be_listed_keeps_no_agent_from_being_ready(
    harness: Harness, lists: dict[Kind, FakeList], caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged; the other kinds are compared, and so are the plans."""
    start(harness)
    lists[Kind.SERVICE].error = ClusterError("503 out of order")
    lists[Kind.ENDPOINT_SLICE].knows_versions = False
    compared(lists)
    assert "no fresh list of Service: 503 out of order" in caplog.text
    assert harness.status.audit_errors == {}
    wait_until("it is ready", lambda: harness.health.ready)


def test_a_service_that_is_planned_otherwise_is_planned_anew(
    harness: Harness, lists: dict[Kind, FakeList]
) -> None:
    """Whatever is wrong with the agent's memory: the maps are read again, and all is planned."""
    start(harness)
    harness.wait_for(lambda status: status.in_sync)
    desired = harness.agent.service_sync.planner.claims.desired
    ((name, wanted),) = desired.items()
    backend = structs.replace(wanted.backends[0], name=BackendName("elsewhere", "nobody"))
    desired[name] = replace(wanted, backends=(backend,))
    wait_until("it is named", lambda: bool(harness.events))
    assert harness.events == ["Service default/a is planned otherwise"]
    harness.wait_for(lambda status: not status.drift)
    assert harness.agent.service_sync.planner.claims.desired[name] == wanted
