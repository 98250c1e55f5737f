# SPDX-License-Identifier: Apache-2.0
"""What the settings and the status say about the engine that was chosen."""

from ebpflb.errors import NodeError
from ebpflb.model.packet_path import AUTO, Engine
from ebpflb.serve.conditions import not_ready
from tests.agent.fakes import FakeNetfilter, Harness, engine_choice
from tests.agent.started import start


def test_netfilter_has_its_table_before_it_serves(harness: Harness) -> None:
    """The table exists before the settings tell programs to choose for netfilter."""
    table = FakeNetfilter()
    harness.engine = engine_choice(AUTO, table)
    start(harness)
    assert table.active
    assert "netfilter" in harness.datapath.settings.flags
    assert harness.datapath.settings_at_plans[0] is harness.datapath.settings


BUSY = NodeError("table inet ebpflb: another process owns it")


def test_a_demanded_engine_is_never_left(harness: Harness) -> None:
    """While the table cannot be made nothing is written, so an earlier agent's state keeps
    translating; the node is not ready, the status says why, and the agent tries again.
    """
    table = FakeNetfilter()
    table.error = BUSY
    harness.engine = engine_choice(Engine.NETFILTER, table)
    start(harness, packet_path=Engine.NETFILTER)
    said = f"the last sync failed: --packet-path=netfilter cannot work now: {BUSY}"
    assert said in not_ready(harness.status)
    assert not (harness.datapath.plans or harness.datapath.attached)
    assert not harness.datapath.settings.flags
    table.error = None
    harness.wait_for(lambda status: not not_ready(status))
    assert "netfilter" in harness.datapath.settings.flags
