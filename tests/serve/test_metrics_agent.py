# SPDX-License-Identifier: Apache-2.0
"""The agent's words as metrics."""

from typing import Any

import msgspec
import pytest

from ebpflb.plan.planner import Planner
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.metrics_agent import NAMED
from ebpflb.serve.status import AgentStatus
from tests.plan.builders import ROOM
from tests.serve.subjects import changes, fake_datapath, settled, value, values

WORDS = AgentStatus(pid=1, node="node-1", source="s", started="now")
SERVICE = "ebpflb_service_not_programmed"


def shown(words: AgentStatus) -> Metrics:
    made = Metrics()
    made.read(fake_datapath(), lambda: Planner(ROOM), words)
    return settled(made)


def test_well() -> None:
    """Nothing is wrong with an agent that has said so."""
    made = shown(WORDS)
    wrong = ("services_not_programmed", "devices_unattached", "sync_failing", "lists_complete")
    assert [value(made, f"ebpflb_{name}") for name in wrong] == [0, 0, 0, 0]
    for name in ("programs_current", "masquerade_ports_reserved"):
        assert value(made, f"ebpflb_{name}") == 1
    names = {name for name, _ in values(made)}
    assert not names & {SERVICE, "ebpflb_source_trouble"}


@pytest.mark.parametrize(
    ("said", "name", "now"),
    [
        ({"complete": True}, "lists_complete", {"": 1}),
        ({"service_ports": 7}, "service_ports", {"": 7}),
        ({"backends": 8}, "backends", {"": 8}),
        ({"unattached": {"eth0": "no", "eth1": "no"}}, "devices_unattached", {"": 2}),
        ({"programs": "old ones: the verifier refused"}, "programs_current", {"": -1}),
        ({"failed": "map is full"}, "sync_failing", {"": 1}),
        ({"unreserved": "read-only"}, "masquerade_ports_reserved", {"": -1}),
        ({"troubles": {"api": "gone", "m": "no"}}, "source_trouble", {"api": 1, "m": 1}),
        (
            {"refused": {"Service a/b": "no", "Service a/c": "no", "Node n": "no"}},
            "objects_refused",
            {"Service": 2, "Node": 1},
        ),
    ],
)
def test_said(said: dict[str, Any], name: str, now: dict[str, float]) -> None:
    """Each word moves its metric and no other, while the agent goes on writing."""
    words = msgspec.structs.replace(WORDS)
    made = shown(words)
    before = values(made)
    for field, content in said.items():
        setattr(words, field, content)
    assert changes(made, before) == {f"ebpflb_{name}": now}


def test_services_not_programmed() -> None:
    """Services are counted, not their ports, and each is named with how many of its ports."""
    unplaced = dict.fromkeys(("shop/web:http", "shop/web:https", "shop/db", "a/web"), "full")
    made = shown(msgspec.structs.replace(WORDS, unplaced=unplaced))
    assert value(made, "ebpflb_services_not_programmed") == 3
    assert value(made, SERVICE, namespace="shop", name="web") == 2
    assert value(made, SERVICE, namespace="shop", name="db") == 1
    assert value(made, SERVICE, namespace="a", name="web") == 1


def test_only_so_many_are_named() -> None:
    """However many there are, the number of series stays bounded; the count does not."""
    unplaced = {f"shop/web-{number}:http": "full" for number in range(3 * NAMED)}
    made = shown(msgspec.structs.replace(WORDS, unplaced=unplaced))
    assert value(made, "ebpflb_services_not_programmed") == 3 * NAMED
    assert sum(name == SERVICE for name, _ in values(made)) == NAMED
