# SPDX-License-Identifier: Apache-2.0
"""Which engine opens flows on a node as it is, and what is made for it, in a fresh namespace."""

import os
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest

from ebpflb.agent import engine_choice
from ebpflb.agent.engine_choice import EngineChoice
from ebpflb.errors import NodeError
from ebpflb.model.addresses import Family
from ebpflb.model.devices import Device
from ebpflb.model.packet_mark import PacketMark
from ebpflb.model.packet_path import AUTO, Engine, PacketPath
from ebpflb.node import nat, nft
from ebpflb.options import Options, Paths
from tests.node import nodes

NAME = f"ebpflb-test-{os.getpid()}-engine"
GATEWAY = (ip_address("10.244.1.1"),)
BRIDGE = Device(3, "cni0", False, True, 0, GATEWAY, GATEWAY, "bridge")
PORT = Device(4, "veth1", False, True, 3, (), (), "veth", hairpin=True)


@pytest.fixture(autouse=True)
def netns() -> Iterator[None]:
    with nodes.fresh(NAME):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[Family, bool]:
    """Whether bridges hand packets to netfilter; off."""
    found = dict.fromkeys(Family, False)
    monkeypatch.setattr(engine_choice, "bridge_calls", lambda: found)
    return found


def test_conntrack_has_its_table(caplog: pytest.LogCaptureFixture) -> None:
    """The table is there before anyone is told that the engine is conntrack; it is logged once."""
    caplog.set_level("INFO")
    choice = EngineChoice(AUTO, missing=None)
    assert choice.path is None
    assert not choice.is_conntrack
    for changed in (True, False):
        assert choice.update((), ()) == changed
        assert choice.is_conntrack
        assert nat.keeps_nat_hooks(nat.ENGINE)
    assert caplog.text.count("packet path: conntrack (") == 1


@pytest.mark.parametrize("chosen", [AUTO, Engine.FLOWS])
def test_flow_tables_need_none(chosen: str) -> None:
    """Where conntrack cannot work, or was not chosen, nothing is made."""
    choice = EngineChoice(chosen, missing="no kfuncs" if chosen == AUTO else None)
    choice.update((), ())
    assert choice.path is not None
    assert choice.path.engine is Engine.FLOWS
    assert not nft.tables()


def test_a_first_pod_on_a_bridge(calls: dict[Family, bool]) -> None:
    """With it the choice becomes the flow tables; with br_netfilter it is conntrack again."""
    choice = EngineChoice(AUTO, missing=None)
    choice.update((BRIDGE,), ())
    assert choice.is_conntrack
    assert choice.update((BRIDGE, PORT), ())
    assert choice.path is not None
    assert choice.path.engine is Engine.FLOWS
    assert "pods on the bridge cni0" in choice.path.reason
    assert nat.keeps_nat_hooks(nat.ENGINE), "its connections may need it"
    calls.update(dict.fromkeys(Family, True))
    assert choice.update((BRIDGE, PORT), ())
    assert choice.is_conntrack


def test_a_port_without_hairpin_mode(calls: dict[Family, bool]) -> None:
    """With br_netfilter it makes the choice the flow tables; with hairpin mode it is conntrack."""
    calls.update(dict.fromkeys(Family, True))
    choice = EngineChoice(AUTO, missing=None)
    choice.update((BRIDGE, replace(PORT, hairpin=False)), ())
    assert choice.path is not None
    assert choice.path.engine is Engine.FLOWS
    assert "without hairpin mode" in choice.path.reason
    assert choice.update((BRIDGE, PORT), ())
    assert choice.is_conntrack


def test_conntrack_was_chosen(calls: dict[Family, bool]) -> None:
    """It stays conntrack, with the obstacle in the reason; where it cannot work it is refused."""
    choice = EngineChoice(Engine.CONNTRACK, missing=None)
    choice.update((BRIDGE, PORT), ())
    assert choice.is_conntrack
    assert choice.path is not None
    assert "although pods on the bridge cni0" in choice.path.reason
    with pytest.raises(NodeError, match="cannot work on this node: no kfuncs"):
        EngineChoice(Engine.CONNTRACK, missing="no kfuncs")


def test_a_mark_that_rules_wait_for() -> None:
    """With --packet-mark auto takes the flow tables, which set it; who chose conntrack is told."""
    mark = PacketMark(0x4000, 0x4000)
    said = "only the flow tables set the mark 0x4000/0x4000 of --packet-mark"
    for chosen, engine, reason in (
        (AUTO, Engine.FLOWS, said),
        (Engine.CONNTRACK, Engine.CONNTRACK, f"chosen by --packet-path, although {said}"),
    ):
        choice = EngineChoice(chosen, missing=None, mark=mark)
        choice.update((), ())
        assert choice.path == PacketPath(engine, reason)


def test_no_table_no_conntrack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table cannot be made the flow tables serve, with the reason."""
    monkeypatch.setattr(nft, "TABLE_FAMILIES", {"inet": 99})
    choice = EngineChoice(AUTO, missing=None)
    choice.update((), ())
    assert choice.path is not None
    assert choice.path.engine is Engine.FLOWS
    assert choice.path.reason.startswith("table inet ebpflb-conntrack: ")


@pytest.mark.parametrize(
    ("options", "conntrack", "lacking", "said"),
    [
        ({"fast_forward": True}, None, None, "in force at 0 devices"),
        ({"fast_forward": True}, None, "no flowtable", "none: no flowtable"),
        ({"fast_forward": True}, "no kfuncs", None, None),
        ({"fast_forward": True, "shadow": True}, None, None, None),
        ({}, None, None, None),
    ],
    ids=["yes", "no flowtable", "no conntrack", "shadow", "not chosen"],
)
def test_flowtable(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, bool],
    conntrack: str | None,
    lacking: str | None,
    said: str | None,
) -> None:
    """Kept where it was chosen and there can be one; the log says why it has no effect."""
    monkeypatch.setattr(engine_choice, "flowtable_obstacle", lambda: lacking)
    chosen = Options(Paths(Path("/none")), "node", Path("/none"), **options)  # type: ignore[arg-type]
    made = engine_choice.flowtable_of(chosen, conntrack)
    assert made.said == said
    assert made.enabled == (said == "in force at 0 devices")
    assert ("--fast-forward has no effect" in caplog.text) == bool(lacking)
