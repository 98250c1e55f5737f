# SPDX-License-Identifier: Apache-2.0
"""The Node says in the API whether Services work (docs/node-readiness.md)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebpflb.agent import node_readiness
from ebpflb.agent.node_readiness import BURST, BURST_SECONDS, HEARTBEAT, NodeReadiness
from ebpflb.cluster.event_recorder import server_factory
from ebpflb.cluster.source import ServerOptions, Timing
from ebpflb.model.nodes import CONDITION, CONDITION_TYPE, OFF, TAINT, TAINT_KEY
from ebpflb.model.objects import Node
from ebpflb.options import Options, Paths
from tests.kit.api_history import Json
from tests.kit.api_server import FakeApiServer

NAME = "node-1"
OTHER: Json = {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-11-27T00:00:00Z"}
OURS: Json = {"key": TAINT_KEY, "effect": "NoSchedule"}
THEIRS: Json = {"key": "dedicated", "value": "db", "effect": "NoSchedule"}


def options(kind: str) -> Options:
    return Options(Paths(Path("/nowhere")), NAME, Path("/nowhere"), node_readiness=kind)


class World:
    """A writer that takes turns when a test says so, and the API server that it writes to."""

    def __init__(self, api: FakeApiServer, folder: Path, kind: str) -> None:
        self.api, self.now, self.ready = api, 1000.0, False
        self.writes: list[bool] = []
        self.stale: Node | None = None
        make = server_factory(ServerOptions(api.kubeconfig(folder)))
        more: Any = {"clock": lambda: self.now, "timing": Timing(jitter=lambda: 1.0)}
        here: Any = self
        self.writer = NodeReadiness(options(kind), here, make, self.writes.append, **more)

    @property
    def node(self) -> Node | None:
        """Set the Node as the watch has it: at once, unless it is ``stale``."""
        if self.stale:
            return self.stale
        try:
            return msgspec.convert(self.api.node(NAME), Node)
        except KeyError:
            return None

    def put(self, *taints: Json, created: str = "2026-11-27T00:00:00Z") -> None:
        metadata = {"name": NAME, "creationTimestamp": created}
        status = {"conditions": [OTHER]}
        spec = {"taints": list(taints)}
        self.api.put({"kind": "Node", "metadata": metadata, "spec": spec, "status": status})

    def turn(self, *, ready: bool | None = None, after: float = 1.0) -> None:
        """Take a turn after this many seconds."""
        self.now += after
        self.ready = self.ready if ready is None else ready
        self.writer.turn()

    def conditions(self) -> dict[str, Json]:
        found: list[Json] = self.api.node(NAME)["status"]["conditions"]
        return {each["type"]: each for each in found}

    def says(self) -> tuple[str, str]:
        ours = self.conditions()[CONDITION_TYPE]
        return ours["status"], ours["reason"]

    def taints(self) -> list[Json]:
        return list(self.api.node(NAME)["spec"]["taints"])


Make = Callable[[str], World]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with FakeApiServer() as api:
        yield lambda kind: World(api, tmp_path, kind)


def test_the_condition_says_whether_services_work(make: Make) -> None:
    """The condition is True while Services work, and False before; other conditions stay
    unchanged.
    """
    world = make(CONDITION)
    world.put()
    world.turn()
    assert world.says() == ("False", "ServicesNotInPlace")
    world.turn(ready=True)
    assert world.says() == ("True", "ServicesInPlace")
    world.turn(ready=False)
    assert world.says() == ("False", "ServicesNotInPlace")
    assert world.conditions()["Ready"] == OTHER
    assert {sent["path"] for sent in world.api.patches} == {f"/api/v1/nodes/{NAME}/status"}
    assert world.writes == [True] * 3


def test_an_unchanged_condition_is_written_rarely(make: Make) -> None:
    """An unchanged condition is written every half an hour to an hour; the time of the last
    transition stays.
    """
    world = make(CONDITION)
    world.put()
    world.turn(ready=True)
    first = world.conditions()[CONDITION_TYPE]
    for _ in range(int(HEARTBEAT) - 1):
        world.turn()
    assert len(world.api.patches) == 1
    for _ in range(int(HEARTBEAT) + 2):
        world.turn()
    (_, second) = world.api.patches
    assert "lastTransitionTime" not in second["body"]["status"]["conditions"][0]
    assert world.conditions()[CONDITION_TYPE]["lastTransitionTime"] == first["lastTransitionTime"]


def test_changes_without_end_cost_the_server_little(make: Make) -> None:
    """With a new state each second for ten minutes, a burst is written, then one state every half a
    minute; the last state is written in the end.
    """
    world = make(CONDITION)
    world.put()
    for number in range(600):
        world.turn(ready=number % 2 == 0)
    assert len(world.api.patches) <= BURST + 600 / BURST_SECONDS
    for _ in range(int(2 * BURST_SECONDS)):
        world.turn(ready=True)
    assert world.says() == ("True", "ServicesInPlace")


def test_a_node_that_is_made_anew_gets_its_condition(make: Make) -> None:
    """The kubelet may register the Node again, without the conditions that other programs have
    written.
    """
    world = make(CONDITION)
    world.put()
    world.turn(ready=True)
    world.put(created="2026-11-28T00:00:00Z")
    assert CONDITION_TYPE not in world.conditions()
    world.turn()
    assert world.says() == ("True", "ServicesInPlace")


def test_a_stopped_agent_says_that_nothing_is_known(make: Make) -> None:
    """When the agent is stopped, the condition becomes Unknown."""
    world = make(CONDITION)
    world.put()
    world.turn(ready=True)
    world.writer.start()
    world.writer.stop()
    assert world.says() == ("Unknown", "AgentStopped")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([OURS], []),
        ([THEIRS, OURS], [THEIRS]),
        ([OURS, THEIRS, {**OURS, "effect": "NoExecute"}], [THEIRS]),
        ([THEIRS], [THEIRS]),
    ],
)
def test_the_taint_is_removed_once_services_work(
    make: Make, before: list[Json], after: list[Json]
) -> None:
    """The taint is removed, whatever its effect and place, but not before Services work; other
    taints stay.
    """
    world = make(TAINT)
    world.put(*before)
    world.turn()
    assert world.taints() == before
    world.turn(ready=True)
    assert world.taints() == after
    assert len(world.api.patches) == (before != after)
    assert {sent["path"] for sent in world.api.patches} <= {f"/api/v1/nodes/{NAME}"}


def test_what_the_server_refuses_is_told_and_tried_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Without permission the agent tries once a minute, with one line in the log."""
    world = make(CONDITION)
    world.put()
    world.api.fail("Patch", 403, b'{"message": "forbidden"}', times=3)
    for _ in range(150):
        world.turn(ready=True)
    assert world.writes == [False] * 3
    assert "forbidden" in str(world.writer.error)
    assert caplog.text.count("the Node's readiness cannot be written") == 1
    world.turn(after=node_readiness.REJECTED_PAUSE)
    assert world.says() == ("True", "ServicesInPlace") and world.writer.error is None


@pytest.mark.parametrize("kind", [OFF, CONDITION])
def test_off_or_without_an_api_server_nothing_runs(kind: str, caplog: Any) -> None:
    """With manifests there is no API server; nothing runs, and the log says so."""
    nowhere: Any = None
    writer = NodeReadiness(options(kind), nowhere, None)
    writer.start()
    assert not writer.thread.is_alive()
    assert ("has no effect" in caplog.text) == (kind == CONDITION)
    writer.stop()
