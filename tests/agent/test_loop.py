# SPDX-License-Identifier: Apache-2.0
"""The agent's loop: events in, plans out, and the status when something is wrong."""

from dataclasses import replace

import pytest
from msgspec import structs

from ebpflb.agent.loop import STATUS_PAUSE
from ebpflb.entries.services import BackendName, Range
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model.events import Key, Kind, Removed, SourceStatus, Together
from ebpflb.plan.map_contents import MapContents
from ebpflb.serve.conditions import conditions, not_ready
from tests.agent.fakes import Harness, changed, found, service, slices
from tests.agent.told import EVERYTHING, NODES, SERVICES, SLICES


def test_waits_for_every_list(harness: Harness) -> None:
    """Nothing is programmed or attached before every list is complete."""
    harness.start()
    for event in (SERVICES, NODES, changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.9"))):
        harness.send(event)
        assert not harness.datapath.plans
        assert not harness.datapath.attached
        assert not harness.status.lists_complete
    harness.send(SLICES)
    assert harness.status.lists_complete
    assert len(harness.datapath.maps.services) == 2


def test_in_force_after_written(serving: Harness) -> None:
    """All listed objects become one plan; after its write the programs are put in force, once."""
    assert len(serving.datapath.plans) == 1
    assert serving.datapath.attached == [serving.options.cgroup]
    serving.send(changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.1")))
    assert len(serving.datapath.attached) == 1


def test_a_burst_of_changes_has_few_statuses(harness: Harness) -> None:
    """Each change of a burst takes effect at once; the status shows them at most 0.1 s later."""
    harness.clock = lambda: harness.now
    harness.start()
    harness.send(*EVERYTHING)
    before = harness.status.backends
    harness.inbox.put(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.8", "10.1.0.9")))
    wait_until("it is applied", lambda: harness.service_sync.backends == before + 1)
    assert harness.status.backends == before
    harness.now += STATUS_PAUSE
    harness.wait_for(lambda status: status.backends == before + 1)


def test_what_comes_together_is_one_plan(serving: Harness) -> None:
    """When a port is renamed in a Service and its slice, its frontend is never without
    endpoints.
    """
    web, slice = service("a", "10.96.0.1"), slices("a", "10.1.0.1")
    web["spec"]["ports"][0]["name"] = slice["ports"][0]["name"] = "renamed"
    plans = len(serving.datapath.plans)
    events = (changed(Kind.ENDPOINT_SLICE, slice), changed(Kind.SERVICE, web))
    serving.send(Together(events))
    (plan,) = serving.datapath.plans[plans:]
    ((frontend, entry),) = plan.services
    assert (str(frontend), entry.cluster.size, plan.removed_services) == ("10.96.0.1:80", 1, [])


def test_a_frontend_that_is_claimed_again_and_again_fills_no_log(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """A Service that comes and goes again and again causes only 25 lines."""
    harness.start()
    harness.send(*EVERYTHING)
    rival = service("rival", "10.96.0.1")
    key, _ = found(Kind.SERVICE, rival)
    for _ in range(40):
        harness.send(changed(Kind.SERVICE, rival))
        assert harness.status.claimed_twice
        harness.send(Removed(Kind.SERVICE, key))
    assert len([it for it in caplog.messages if "is claimed more than once" in it]) == 25


def test_too_many_ports_are_an_event(serving: Harness) -> None:
    """The Service gets an Event, a condition and a line in the log; its first ports are served."""
    ports = [{"name": f"p{number}", "port": number} for number in range(1, 1002)]
    key = Key("default", "c")
    serving.send(changed(Kind.SERVICE, manifests.service("c", ["10.96.0.7"], ports)))
    wait_until("it is planned", lambda: str(key) in serving.status.not_programmed)
    reason = "spec.ports: too many: the first 1000 of 1001 are used"
    assert serving.lacks == [(key, reason)]
    assert serving.status.not_programmed == {str(key): reason}
    assert any(reason in each.text for each in conditions(serving.status))
    wait_until("it is served", lambda: len(serving.datapath.maps.services) == 2 + 1000)
    serving.send(changed(Kind.SERVICE, manifests.service("c", ["10.96.0.7"], ports[:1])))
    wait_until("nothing is beyond a limit", lambda: not serving.status.not_programmed)


def test_not_programmed(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """A Service that does not fit is named once in log, event and status, and the node is still
    ready; when space is freed, the Service is served without any change to it.
    """
    everywhere = Range(0, 1 << 30)
    harness.datapath.leftovers = MapContents(leftover_blocks={everywhere})  # rests for a second
    harness.start()
    harness.send(*EVERYTHING)
    assert harness.status.not_programmed["default/a"].startswith("map slots is full")
    assert not_ready(harness.status) == []
    lines = [it.getMessage() for it in caplog.records if "Service default/a: " in it.getMessage()]
    assert len(lines) == 1 and "map slots is full" in lines[0]
    assert [str(key) for key, _ in harness.lacks].count("default/a") == 1
    harness.wait_for(lambda status: not status.not_programmed)
    assert len(harness.datapath.maps.services) == 2


def test_errors_of_an_api_server(serving: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """A restart of the API server gives one warning and one line about the recovery for all four
    kinds; an error of a single kind is named.
    """
    caplog.set_level("INFO")
    kinds = [f"https://192.0.2.1:6443/{kind}" for kind in ("services", "nodes", "slices", "cidrs")]
    for error in ("refused", None):
        for source in kinds:
            serving.send(SourceStatus(source, error))
    for source, error in ((kinds[0], "refused"), (kinds[1], "forbidden"), ("file", "no YAML")):
        serving.send(SourceStatus(source, error))
    for source in ("file", *kinds[:2]):
        serving.send(SourceStatus(source, None))
    assert not {*kinds, "file"} & serving.status.source_errors.keys()
    said = [(it.levelname, it.getMessage()) for it in caplog.records]
    assert [it for it in said if "6443" in it[1] or "file" in it[1]] == [
        ("WARNING", f"{kinds[0]}: refused"),
        ("INFO", "https://192.0.2.1:6443: recovered"),
        ("WARNING", f"{kinds[0]}: refused"),
        ("WARNING", f"{kinds[1]}: forbidden"),
        ("WARNING", "file: no YAML"),
        ("INFO", "file: recovered"),
        ("INFO", "https://192.0.2.1:6443: recovered"),
    ]


def test_a_service_that_is_planned_otherwise_is_planned_again(harness: Harness) -> None:
    """A list of Services plans all of them again, whatever is wrong in the agent's memory."""
    harness.start()
    harness.send(*EVERYTHING)
    harness.wait_for(lambda status: status.in_sync)
    desired = harness.service_sync.planner.claims.desired
    name, wanted = next(iter(desired.items()))
    backend = structs.replace(wanted.backends[0], name=BackendName("elsewhere", "nobody"))
    desired[name] = replace(wanted, backends=(backend,))
    harness.send(SERVICES)
    wait_until("it is planned as it should be", lambda: desired[name] == wanted)
