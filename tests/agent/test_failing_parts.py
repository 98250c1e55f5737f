# SPDX-License-Identifier: Apache-2.0
"""A mistake of the program in a part of the agent's loop: no other part stops, and it is named."""

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.model.events import Kind, SourceStatus
from ebpflb.model.untracked import NO_UNTRACKED
from ebpflb.serve.conditions import Cause, conditions
from ebpflb.serve.listener import Request
from ebpflb.stopping import parts
from tests.agent.fakes import Harness, changed, slices

LOOP = (
    *("programs", "canary", "endpoint health", "node-local"),
    *("engine", "audit", "history", "status"),
)


@pytest.mark.parametrize("part", LOOP)
def test_services_are_served_while_a_part_of_the_loop_fails(
    serving: Harness, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoints change, /livez is 200, and the status names the part until it works."""

    def fail() -> None:
        raise TypeError("a mistake")

    agent = serving.agent
    each = {it.name: it for it in (*agent.parts_before, *agent.parts_after)}
    assert each.keys() == set(LOOP)
    with monkeypatch.context() as patched:
        patched.setattr(each[part], "turn", fail)
        agent.inbox.put(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.9")))
        wait_until("it is applied", lambda: "10.1.0.9" in served(serving))
        assert serving.health.respond(Request("/livez", "")).status == 200
        if part != "status":
            last = serving.wait_for(lambda status: status.failing_parts)
            assert last.failing_parts == {part: "TypeError: a mistake"}
            (condition,) = [it for it in conditions(last) if it.cause is Cause.FAILING_PARTS]
            assert condition.text == f"a part of the agent fails: {part}: TypeError: a mistake"
            assert not condition.unready
    agent.inbox.put(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.8")))
    wait_until("it works", lambda: not parts.is_failing(part) or wake(serving))
    serving.wait_for(lambda status: not status.failing_parts)


def test_services_are_served_though_what_is_observed_cannot_be_taken(
    serving: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named until something of the kind is taken."""
    with monkeypatch.context() as patched:
        patched.setattr(serving.agent.cluster, "set_untracked", lambda _: 1 // 0)
        serving.agent.inbox.put(NO_UNTRACKED)
        serving.send(changed(Kind.ENDPOINT_SLICE, slices("b", "10.1.0.9")))
        assert "10.1.0.9" in served(serving)
        serving.wait_for(lambda status: list(status.failing_parts) == ["observed untracked"])
    serving.send(NO_UNTRACKED)
    serving.wait_for(lambda status: not status.failing_parts)


def served(harness: Harness) -> set[str]:
    answers = harness.datapath.maps.lookups().values()
    return {str(backend.address) for it in answers for backend in it.cluster}


def wake(harness: Harness) -> bool:
    """Parts have their turn with each turn of the loop, which takes a message."""
    harness.agent.inbox.put(SourceStatus("wake", None))
    return False
