# SPDX-License-Identifier: Apache-2.0
"""The agent's status as metrics."""

from typing import Any

import pytest

from ebpflb.model.nodes import STATES
from ebpflb.model.packet_path import Engine, PacketPath
from ebpflb.serve.health import Health
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.status import AgentStatus
from tests.serve.subjects import changes, counts, sources, value, values

STATUS = AgentStatus(pid=1, node="node-1", source="s", started="2026-11-23T12:00:00+00:00")
SERVICE = "ebpflb_service_not_programmed"


def reading(published: list[AgentStatus]) -> Metrics:
    """Return the metrics of an agent that appends each status that it publishes to a list."""
    made = Metrics()
    made.read(sources(status=lambda: published[-1]))
    return made


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
def test_each_field_changes_only_its_metric(
    fields: dict[str, Any], name: str, now: dict[str, float]
) -> None:
    """Each field changes only its own metric, as soon as the agent has published it."""
    published = [STATUS]
    made = reading(published)
    before = values(made)
    published.append(STATUS.changed(**fields))
    moved = changes(made, before)
    moved.pop("ebpflb_condition", None)
    assert moved == {f"ebpflb_{name}": now}


def test_the_loop() -> None:
    """The metrics have the health, the wait of the oldest message, and counts of the agent's
    parts.
    """
    now, waiting = 100.0, 0.0
    health = Health(60, monotonic=lambda: now, waiting=lambda: waiting)
    seen = counts()
    made = Metrics()
    made.read(sources()._replace(health=health, counts=lambda: seen))
    names = "ebpflb_healthy", "ebpflb_ready", "ebpflb_inbox_oldest_seconds"
    assert [value(made, name) for name in names] == [1, 0, 0]
    health.set_not_ready([])
    health.turned()
    health.queued()
    now, waiting = 159.0, 3.5
    assert [value(made, name) for name in names] == [1, 0, 3.5]  # the loop has not turned
    health.turned()
    assert value(made, "ebpflb_ready") == 1
    now = 161.0
    assert value(made, "ebpflb_healthy") == 0
    before = values(made)
    seen = counts(aside=2, times=3, dropped=6)
    assert changes(made, before) == {
        "ebpflb_endpoints_set_aside": {"": 2},
        "ebpflb_endpoint_set_aside_total": {"": 3},
        "ebpflb_node_local_listeners": dict.fromkeys(STATES, 6),
        "ebpflb_connections_moved_total": {"": 6},
        "ebpflb_events_dropped_total": {"": 6},
    }


def test_conditions_are_those_of_the_status() -> None:
    """Each condition has a sample while it lasts, including those that are usual after a start."""
    serving = STATUS.changed(attached=True, in_sync=True, lists_complete=True)
    published = [serving]
    made = reading(published)
    before = values(made)
    published.append(serving.changed(drift={"map slots": "differs"}, in_sync=False))
    assert changes(made, before) == {
        "ebpflb_condition": {"drift": 1, "sync error": 1},
        "ebpflb_audit_outstanding": {"": 1},
    }


def test_load_balancer_addresses() -> None:
    """There are series only with --l2-pool."""
    owners = {"192.0.2.1": STATUS.node, "192.0.2.2": "another"}
    made = reading(
        [
            STATUS.changed(
                addresses="2 announced by this cluster, 1 owned here",
                address_owners=owners,
                address_moves=3,
                address_conflicts={"192.0.2.2": "02:00:00:00:00:01 answers for it too"},
                addresses_missing={"shop/web": "no free address"},
            )
        ]
    )
    assert value(made, "ebpflb_l2_addresses", state="announced") == 2
    assert value(made, "ebpflb_l2_addresses", state="owned") == 1
    assert value(made, "ebpflb_l2_moves_total") == 3
    assert value(made, "ebpflb_l2_conflicts") == 1
    assert value(made, "ebpflb_l2_addresses_missing") == 1
    assert not [name for name, _ in values(reading([STATUS])) if name.startswith("ebpflb_l2_")]


def test_hand_overs() -> None:
    """What is not handed over is counted: nodes, and addresses that rules drop; with the option."""
    blocked = {"two": "192.0.2.2 answers no test", "203.0.113.1": "a rule"}
    made = reading([STATUS.changed(hand_over="to 1 of 2 other nodes", not_handed_to=blocked)])
    assert value(made, "ebpflb_hand_over_blocked") == 2
    assert "ebpflb_hand_over_blocked" not in {name for name, _ in values(reading([STATUS]))}


def test_services_not_programmed() -> None:
    """Services that are not programmed are counted, and each of them is named."""
    reasons = dict.fromkeys(("shop/web", "shop/db", "a/web"), "full")
    made = reading([STATUS.changed(not_programmed=reasons)])
    assert value(made, "ebpflb_services_not_programmed") == 3
    assert value(made, SERVICE, namespace="shop", name="web") == 1
    assert value(made, SERVICE, namespace="shop", name="db") == 1
    assert value(made, SERVICE, namespace="a", name="web") == 1
