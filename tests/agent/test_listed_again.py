# SPDX-License-Identifier: Apache-2.0
"""New lists while the agent serves: the maps follow them, whatever they held."""

from dataclasses import replace

import pytest
from msgspec import structs

from ebpflb.entries.services import BackendName
from ebpflb.lab.agents import wait_until
from ebpflb.model.events import Kind, Replaced
from tests.agent.fakes import Harness, listed, service, slices
from tests.agent.started import SERVICES, start


def programmed(harness: Harness) -> dict[str, set[str]]:
    """Return each Service with its frontends and its endpoints in the maps."""
    entries = harness.datapath.maps.read_back().entries
    return {
        name.service: {str(it.address) for it in found.services}
        | {str(it.address) for it in found.backends}
        for name, found in entries.items()
    }


MORE = Replaced(
    Kind.SERVICE, {**SERVICES.objects, **listed(Kind.SERVICE, service("b", "10.96.0.2")).objects}
)


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (listed(Kind.SERVICE, service("a", "10.96.0.9")), {"a": {"10.96.0.9", "10.1.0.1"}}),
        (MORE, {"a": {"10.96.0.1", "10.1.0.1"}, "b": {"10.96.0.2"}}),
        (listed(Kind.SERVICE), {}),
        (listed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.77")), {"a": {"10.96.0.1", "10.1.0.77"}}),
        (listed(Kind.ENDPOINT_SLICE), {"a": {"10.96.0.1"}}),
    ],
    ids=["changed", "created", "gone", "slice changed", "slice gone"],
)
def test_what_no_watch_has_told_is_programmed(
    harness: Harness, says: Replaced, expected: dict[str, set[str]]
) -> None:
    """A change that only the list shows is programmed."""
    start(harness)
    harness.send(says)
    wait_until("it is in the maps", lambda: programmed(harness) == expected)
    assert harness.status.drift == {}


def test_a_service_that_is_planned_otherwise_is_planned_again(harness: Harness) -> None:
    """A list of Services plans all of them again, whatever is wrong in the agent's memory."""
    start(harness)
    harness.wait_for(lambda status: status.in_sync)
    desired = harness.service_sync.planner.claims.desired
    ((name, wanted),) = desired.items()
    backend = structs.replace(wanted.backends[0], name=BackendName("elsewhere", "nobody"))
    desired[name] = replace(wanted, backends=(backend,))
    harness.send(SERVICES)
    wait_until("it is planned as it should be", lambda: desired[name] == wanted)


def test_a_list_of_what_is_known_writes_nothing(harness: Harness) -> None:
    """A list that brings nothing new, as every agent gets of each kind every few hours, writes
    nothing.
    """
    start(harness)
    harness.wait_for(lambda status: status.in_sync)
    before = len(harness.datapath.plans)
    harness.send(SERVICES)
    harness.wait_for(lambda status: status.in_sync)
    assert len(harness.datapath.plans) == before
