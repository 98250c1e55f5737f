# SPDX-License-Identifier: Apache-2.0
"""A bug in one part of the agent's loop is named, and stops no other part."""

from collections.abc import Callable

import pytest

from ebpflb.agent import service_sync
from ebpflb.lab.agents import wait_until
from ebpflb.model import services
from ebpflb.model.events import Kind, SourceStatus, Together
from ebpflb.model.facts import Fact, Observed
from ebpflb.plan.planner import Plan
from ebpflb.serve.conditions import Cause, conditions
from ebpflb.serve.listener import Request
from ebpflb.stopping import parts
from tests.agent.fakes import FakeDatapath, Harness, changed, listed, service, slices
from tests.agent.planning_mutations import in_steps, in_the_middle_of_slots, in_the_plan

TURNS = ("programs", "canary", "services", "engine", "audit")
OBSERVERS = ("reports", "stale endpoints", "history", "API servers")


@pytest.mark.parametrize("part", [*TURNS, *OBSERVERS, "status"])
def test_services_are_served_while_a_part_of_the_loop_fails(
    serving: Harness, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoints change, /livez is 200, and the status names the part until it works."""

    def fail(*_: object) -> None:
        raise TypeError("a mistake")

    inbox, each = serving.inbox, {it.name: it for it in serving.agent.parts}
    each["status"] = serving.agent  # type: ignore[assignment]
    method = "turn" if part in TURNS else "observe" if part in OBSERVERS else "_publish"
    if part in TURNS:  # it is always due
        always = property(lambda self: 0.0, lambda self, value: None)
        monkeypatch.setattr(type(each[part]), "due", always)
    with monkeypatch.context() as patched:
        patched.setattr(each[part], method, fail)
        inbox.put(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.9")))
        wait_until("it is applied", lambda: "10.1.0.9" in served(serving))
        assert serving.health.respond(Request("/livez", "")).status == 200
        if part != "status":
            last = serving.wait_for(lambda status: status.failing_parts)
            assert last.failing_parts == {part: "TypeError: a mistake"}
            (condition,) = [it for it in conditions(last) if it.cause is Cause.FAILING_PARTS]
            assert condition.text == f"a part of the agent fails: {part}: TypeError: a mistake"
            assert not condition.unready
    inbox.put(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.8")))
    wait_until("it works", lambda: not parts.is_failing(part) or wake(serving))
    serving.wait_for(lambda status: not status.failing_parts)


def test_services_are_served_though_what_is_observed_cannot_be_taken(
    serving: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services are served, and the fact that cannot be taken is named until one of its messages
    is.
    """
    none = Observed(Fact.UNTRACKED_DESTINATIONS, frozenset())
    with monkeypatch.context() as patched:
        patched.setattr(serving.cluster, "observe", lambda *_: 1 // 0)
        serving.inbox.put(none)
        serving.send(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.9")))
        assert "10.1.0.9" in served(serving)
        serving.wait_for(lambda status: list(status.failing_parts) == ["observed rules in raw"])
    serving.send(none)
    serving.wait_for(lambda status: not status.failing_parts)


def served(harness: Harness) -> set[str]:
    answers = harness.datapath.maps.lookups().values()
    return {str(backend.address) for it in answers for backend in it.cluster}


def wake(harness: Harness) -> bool:
    """Give each part a turn: a turn of the loop takes a message."""
    harness.inbox.put(SourceStatus("wake", None))
    return False


def _in_the_writes(patched: pytest.MonkeyPatch) -> None:
    apply = FakeDatapath.apply

    def failing(datapath: FakeDatapath, plan: Plan) -> None:
        if any(str(frontend.address) == "10.96.0.7" for frontend, _ in plan.services):
            raise ValueError("a mistake")
        apply(datapath, plan)

    patched.setattr(FakeDatapath, "apply", failing)


@pytest.mark.parametrize("fail", [in_steps, in_the_plan, _in_the_writes])
def test_a_service_whose_plan_fails_stops_no_other(
    serving: Harness, fail: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Service's last good state stays, and a condition names it, until it can be planned.
    Changes of other Services are written, also in the failing plan and after it.
    """
    serving.send(changed(Kind.SERVICE, service("web", "10.96.0.7")))
    serving.send(changed(Kind.ENDPOINT_SLICE, slices("web", "10.1.0.1")))
    part, failure = "Service default/web", "ValueError: a mistake"
    monkeypatch.setattr(service_sync, "FAILED_RETRY", 1.0)
    with monkeypatch.context() as patched:
        fail(patched)
        both = slices("web", "10.1.0.66"), slices("b", "10.1.0.9")
        serving.inbox.put(Together(tuple(changed(Kind.ENDPOINT_SLICE, it) for it in both)))
        wait_until("the other is applied", lambda: "10.1.0.9" in served(serving))
        serving.wait_for(lambda status: status.failing_parts.get(part) == failure)
        serving.inbox.put(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.10")))
        wait_until("the other is applied", lambda: "10.1.0.10" in served(serving))
        assert "10.1.0.1" in served(serving)
        assert "10.1.0.66" not in served(serving)
        assert serving.health.respond(Request("/livez", "")).status == 200
    wait_until("it is planned", lambda: "10.1.0.66" in served(serving))
    serving.wait_for(lambda status: not status.failing_parts)


def test_a_service_that_fails_in_the_middle_of_its_slots_keeps_none(
    serving: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of the Service that were written ahead are freed, and other Services go on."""
    many = [f"10.1.{number // 250}.{number % 250 + 1}" for number in range(1100)]
    serving.send(changed(Kind.SERVICE, service("web", "10.96.0.7")))
    with monkeypatch.context() as patched:
        in_the_middle_of_slots(patched)
        serving.inbox.put(changed(Kind.ENDPOINT_SLICE, slices("web", *many)))
        serving.wait_for(lambda status: "Service default/web" in status.failing_parts)
        serving.inbox.put(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.9.9")))
        wait_until("the other is applied", lambda: "10.1.9.9" in served(serving))
        assert not serving.service_sync.planner.space.ahead


def test_the_first_sync_serves_all_but_the_service_that_fails(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries that an earlier agent wrote for the failing Service stay."""
    found = {"web": "10.96.0.1", "b": "10.96.0.2"}
    lists = (
        listed(Kind.SERVICE, *(service(name, ip) for name, ip in found.items())),
        listed(Kind.ENDPOINT_SLICE, slices("web", "10.1.0.1"), slices("b", "10.1.0.2")),
        listed(Kind.NODE),
    )
    harness.start()
    harness.send(*lists)
    harness.stop()
    with monkeypatch.context() as patched:
        in_steps(patched)
        harness.start()
        changes = listed(Kind.ENDPOINT_SLICE, slices("web", "10.1.0.66"), slices("b", "10.1.0.9"))
        harness.send(lists[0], changes, lists[2])
        wait_until("it serves", lambda: harness.status.attached)
        assert served(harness) == {"10.1.0.1", "10.1.0.9"}
        harness.wait_for(lambda status: list(status.failing_parts) == ["Service default/web"])


def test_an_object_whose_reading_fails_keeps_its_last_good_state(
    serving: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(services, "parse", lambda *_: 1 // 0)
        serving.send(changed(Kind.SERVICE, service("b", "10.96.0.77")))
        serving.send(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.9")))
        assert "10.1.0.9" in served(serving)
        (text,) = serving.status.invalid_objects.values()
        assert text.startswith("object: unexpected ZeroDivisionError")
    serving.send(changed(Kind.SERVICE, service("b", "10.96.0.77")))
    serving.wait_for(lambda status: not status.invalid_objects)
