# SPDX-License-Identifier: Apache-2.0
"""What the settings and the status say of the engine that was chosen."""

from ebpflb.errors import NodeError
from ebpflb.model.packet_path import AUTO, Engine, PacketPath
from tests.agent.fakes import FakeNetfilter, Harness, engine_choice
from tests.agent.started import start


def test_netfilter(harness: Harness) -> None:
    """The settings tell programs to choose for it, and its table is there before."""
    table = FakeNetfilter()
    harness.engine = engine_choice(AUTO, table)
    start(harness)
    assert table.active
    assert "netfilter" in harness.datapath.settings["flags"]
    assert harness.datapath.settings_at_plans[0] is harness.datapath.settings


def test_flow_tables(harness: Harness) -> None:
    """The same programs leave netfilter alone."""
    table = FakeNetfilter()
    harness.engine = engine_choice(Engine.FLOWS, table)
    start(harness, packet_path="flows")
    assert not table.starts
    assert "netfilter" not in harness.datapath.settings["flags"]


def test_missing(harness: Harness) -> None:
    """The status says why auto has the flow tables."""
    harness.engine = engine_choice(AUTO, missing="no nf_tables")
    start(harness)
    assert "netfilter" not in harness.datapath.settings["flags"]
    assert harness.agent.status.packet_path == PacketPath(Engine.FLOWS, "no nf_tables")


def test_a_table_that_cannot_be_made(harness: Harness) -> None:
    """Programs choose for netfilter only if it has its table; the status says why it has none."""
    table = FakeNetfilter()
    table.error = NodeError("table inet ebpflb: another process owns it")
    harness.engine = engine_choice(AUTO, table)
    start(harness)
    assert "netfilter" not in harness.datapath.settings["flags"]
    assert harness.agent.status.packet_path == PacketPath(Engine.FLOWS, str(table.error))
