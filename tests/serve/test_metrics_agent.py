# SPDX-License-Identifier: Apache-2.0
"""The agent's status as metrics."""

from typing import Any

import pytest

from ebpflb.model.packet_path import Engine, PacketPath
from ebpflb.plan.planner import Planner
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.metrics_agent import MAX_SERIES
from ebpflb.serve.status import AgentStatus
from tests.plan.builders import CAPACITY
from tests.serve.subjects import changes, fake_datapath, settled, value, values

STATUS = AgentStatus(pid=1, node="node-1", source="s", started="2026-11-23T12:00:00+00:00")
SERVICE = "ebpflb_service_not_programmed"


def reading(published: list[AgentStatus]) -> Metrics:
    """The metrics of an agent that appends each status that it publishes."""
    made = Metrics()
    made.read(fake_datapath(), lambda: Planner(CAPACITY), lambda: published[-1])
    return settled(made)


def test_well() -> None:
    """Nothing is wrong in the status of a new agent."""
    made = reading([STATUS])
    wrong = ("services_not_programmed", "devices_not_served")
    assert [value(made, f"ebpflb_{name}") for name in wrong] == [0, 0]
    assert value(made, "ebpflb_masquerade_ports_reserved") == 1
    names = {name for name, _ in values(made)}
    assert not names & {SERVICE, "ebpflb_source_error"}


@pytest.mark.parametrize(
    ("fields", "name", "now"),
    [
        ({"service_ports": 7}, "service_ports", {"": 7}),
        ({"backends": 8}, "backends", {"": 8}),
        ({"devices_not_served": {"eth0": "no", "eth1": "no"}}, "devices_not_served", {"": 2}),
        ({"devices_to_come": 3}, "devices_to_come", {"": 3}),
        ({"ports_not_open": {"metrics server": "in use"}}, "ports_not_open", {"": 1}),
        ({"ports_not_reserved": "read-only"}, "masquerade_ports_reserved", {"": -1}),
        (
            {"packet_path": PacketPath(Engine.NETFILTER, "it works")},
            "packet_path_info",
            {"netfilter it works": 1},
        ),
        ({"source_errors": {"api": "gone", "m": "no"}}, "source_error", {"api": 1, "m": 1}),
        (
            {"invalid_objects": {"Service a/b": "no", "Service a/c": "no", "Node n": "no"}},
            "objects_invalid",
            {"Service": 2, "Node": 1},
        ),
    ],
)
def test_fields(fields: dict[str, Any], name: str, now: dict[str, float]) -> None:
    """Each field moves its metric and no other, as soon as the agent has published it."""
    published = [STATUS]
    made = reading(published)
    before = values(made)
    published.append(STATUS.changed(**fields))
    moved = changes(made, before)
    moved.pop("ebpflb_condition", None)
    assert moved == {f"ebpflb_{name}": now}


def test_conditions_are_those_of_the_status() -> None:
    """Each has a sample as long as it lasts; what is usual after a start has one too."""
    serving = STATUS.changed(attached=True, in_sync=True, lists_complete=True)
    published = [serving]
    made = reading(published)
    before = values(made)
    published.append(serving.changed(drift={"map slots": "differs"}, in_sync=False))
    assert changes(made, before) == {
        "ebpflb_condition": {"drift": 1, "sync error": 1},
        "ebpflb_audit_outstanding": {"": 1},
    }


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"lists_complete": False}, "lists not complete"),
        ({"node_unknown": "no Node has the name n"}, "node unknown"),
        (
            {"programs": "an earlier version's: the verifier refused"},
            "programs of an earlier version",
        ),
        ({"sync_error": "map is full"}, "sync error"),
        ({"audit_errors": {"maps": "no"}}, "audit errors"),
    ],
)
def test_each_condition_has_a_sample(fields: dict[str, Any], cause: str) -> None:
    """Alerts ask for these."""
    serving = STATUS.changed(attached=True, in_sync=True, lists_complete=True)
    published = [serving]
    made = reading(published)
    before = values(made)
    published.append(serving.changed(**fields))
    assert changes(made, before) == {"ebpflb_condition": {cause: 1}}


def test_services_not_programmed() -> None:
    """They are counted, and each is named."""
    reasons = dict.fromkeys(("shop/web", "shop/db", "a/web"), "full")
    made = reading([STATUS.changed(not_programmed=reasons)])
    assert value(made, "ebpflb_services_not_programmed") == 3
    assert value(made, SERVICE, namespace="shop", name="web") == 1
    assert value(made, SERVICE, namespace="shop", name="db") == 1
    assert value(made, SERVICE, namespace="a", name="web") == 1


def test_only_so_many_are_named() -> None:
    """However many there are, the number of series stays bounded; the count does not."""
    reasons = {f"shop/web-{number}": "full" for number in range(3 * MAX_SERIES)}
    made = reading([STATUS.changed(not_programmed=reasons)])
    assert value(made, "ebpflb_services_not_programmed") == 3 * MAX_SERIES
    assert sum(name == SERVICE for name, _ in values(made)) == MAX_SERIES
