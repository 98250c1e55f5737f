# SPDX-License-Identifier: Apache-2.0
"""Which engine translates new flows on a node, and when it changes."""

import math
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any

import pytest
from msgspec.structs import replace

from ebpflb.agent import engine
from ebpflb.agent.engine import SETTLE_SECONDS, EngineChoice
from ebpflb.errors import NodeError
from ebpflb.model.addresses import Family, Network
from ebpflb.model.devices import Device
from ebpflb.model.packet_path import AUTO, Engine, PacketMark, PacketPath
from tests.agent import fakes
from tests.agent.fakes import FakeNetfilter

GATEWAY = (ip_address("10.244.1.1"),)
BRIDGE = Device(3, "cni0", False, True, 0, GATEWAY, GATEWAY, "bridge")
PORT = Device(4, "veth1", False, True, 3, (), (), "veth", hairpin=True)
PLAIN = replace(PORT, hairpin=False)
PERIOD = 30.0


class Node:
    """An engine's choice, with the test's clock and devices."""

    def __init__(self, chosen: str = AUTO, *, period: float = 0.0, **options: Any) -> None:
        self.now, self.table = 1000.0, FakeNetfilter()
        self.choice: EngineChoice = fakes.engine_choice(
            chosen, self.table, sync_period=period, clock=lambda: self.now, **options
        )

    def update(self, *devices: Device, pods: Collection[Network] = ()) -> bool:
        return self.choice.update(devices, pods)

    def settle(self, *devices: Device) -> Engine:
        """Return the engine after these devices have been there for a while."""
        self.update(*devices)
        self.now = max(self.now, self.choice.due if self.choice.due < math.inf else 0.0)
        self.update(*devices)
        return self.path.engine

    @property
    def path(self) -> PacketPath:
        assert self.choice.path
        return self.choice.path


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[Family, bool]:
    """Return the setting with which bridges hand no packets to netfilter."""
    found = dict.fromkeys(Family, False)
    monkeypatch.setattr(engine, "bridge_calls", lambda: found)
    return found


def test_netfilter_has_its_table(caplog: pytest.LogCaptureFixture) -> None:
    """The table exists before the engine is reported to be netfilter; this is logged once."""
    caplog.set_level("INFO")
    node = Node()
    assert node.choice.path is None
    assert not node.choice.is_netfilter
    for changed in (True, False):
        assert node.update() == changed
        assert node.choice.is_netfilter
        assert node.choice.flags == {"netfilter"}
        assert node.table.active
    assert node.table.starts == 1
    assert caplog.text.count("packet path: netfilter (") == 1


def test_a_first_pod_on_a_bridge(
    calls: dict[Family, bool], caplog: pytest.LogCaptureFixture
) -> None:
    """The first pod on a bridge changes the engine to the flow tables; with br_netfilter it is
    netfilter again. Further pods, which the reason names, are not logged.
    """
    caplog.set_level("INFO")
    node = Node()
    assert node.settle(BRIDGE) is Engine.NETFILTER
    assert node.settle(BRIDGE, PORT) is Engine.FLOWS
    assert "pods on the bridge cni0" in node.path.reason
    assert not node.table.active
    calls.update(dict.fromkeys(Family, True))
    assert node.settle(BRIDGE, PORT) is Engine.NETFILTER
    assert node.table.active
    assert node.settle(BRIDGE, PLAIN) is Engine.FLOWS
    assert "1 more" not in node.path.reason
    assert node.settle(BRIDGE, PLAIN, replace(PLAIN, index=5)) is Engine.FLOWS
    assert "1 more" in node.path.reason
    assert caplog.text.count("packet path: ") == 4


def test_a_port_that_is_about_to_get_hairpin_mode(calls: dict[Family, bool]) -> None:
    """A CNI sets up a port step by step: a reason that ends in time changes nothing, and the next
    reason has to last as long.
    """
    calls.update(dict.fromkeys(Family, True))
    node = Node()
    node.update(BRIDGE)
    for _ in range(5):
        assert not node.update(BRIDGE, PLAIN)
        assert node.choice.due == node.now + SETTLE_SECONDS
        node.now += SETTLE_SECONDS - 0.1
        assert not node.update(BRIDGE, PLAIN)
        assert not node.update(BRIDGE, PORT)
        assert node.choice.due == math.inf
        assert node.choice.is_netfilter


def test_once_per_sync_period(calls: dict[Family, bool]) -> None:
    """An engine that has just changed stays for a sync period, whatever happens on the node."""
    node = Node(period=PERIOD)
    changes = []
    node.update(BRIDGE)
    begun = node.now
    for second in range(1, int(4 * PERIOD)):
        node.now = begun + second
        is_on = second // 7 % 2 == 0
        calls.update(dict.fromkeys(Family, is_on))
        if node.update(BRIDGE, PORT) and second:
            changes.append(node.now)
    assert len(changes) >= 2
    for former, later in zip([begun, *changes], changes, strict=False):
        assert later - former >= PERIOD


def test_netfilter_was_chosen() -> None:
    """If netfilter was chosen it stays, with the obstacle in the reason; if it cannot work, it is
    refused.
    """
    node = Node(Engine.NETFILTER)
    assert node.settle(BRIDGE, PORT) is Engine.NETFILTER
    assert "although pods on the bridge cni0" in node.path.reason
    with pytest.raises(NodeError, match="cannot work on this node: no nf_tables"):
        Node(Engine.NETFILTER, missing="no nf_tables")


def test_a_mark_that_rules_wait_for() -> None:
    """With --packet-mark, auto chooses the flow tables; a forced netfilter gets a warning."""
    mark = PacketMark(0x4000, 0x4000)
    said = "only the flow tables set the mark 0x4000/0x4000 of --packet-mark"
    for chosen, took, reason in (
        (AUTO, Engine.FLOWS, said),
        (Engine.NETFILTER, Engine.NETFILTER, f"chosen by --packet-path, although {said}"),
    ):
        node = Node(chosen, packet_mark=mark)
        node.update()
        assert node.path == PacketPath(took, reason)


def test_no_table_no_netfilter() -> None:
    """If the table cannot be made the flow tables serve, with the reason. The agent tries again at
    each look, and changes to netfilter after the table has been possible for long enough.
    """
    node = Node(period=PERIOD)
    node.table.error = NodeError("table inet ebpflb: busy")
    node.update()
    assert node.path == PacketPath(Engine.FLOWS, "table inet ebpflb: busy")
    node.table.error = None
    assert node.settle() is Engine.NETFILTER
    assert node.table.active


def test_flows_are_forgotten_four_times_in_ten_minutes() -> None:
    """A tenant who adds and removes a scheduler again and again does not make the agent take the
    programs at egress off each time.
    """
    node = Node()

    def forgets() -> bool:
        node.now += 60
        node.table.beside_flows = True
        node.choice.forget_flows()
        return not node.table.beside_flows

    assert [forgets() for _ in range(11)] == [True] * 4 + [False] * 6 + [True]
