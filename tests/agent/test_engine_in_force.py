# SPDX-License-Identifier: Apache-2.0
"""Which programs are loaded for an engine, and what the settings and the status say of it."""

from dataclasses import replace

from ebpflb.agent.engine_choice import EngineChoice
from ebpflb.errors import VerifierError
from ebpflb.model.packet_path import AUTO, Engine
from tests.agent.fakes import Harness
from tests.agent.test_node_sync import start

REJECTED = VerifierError("the verifier rejected program ingress: too large\nand its log")


def test_conntrack(harness: Harness) -> None:
    """The programs that have it are loaded, and the settings tell them to use it."""
    harness.engine = EngineChoice(AUTO, missing=None)
    start(harness)
    assert harness.datapath.conntrack
    assert "conntrack" in harness.datapath.settings["flags"]


def test_flow_tables(harness: Harness) -> None:
    """The same programs, so that conntrack's flows go on; but they open none there."""
    harness.engine = EngineChoice(Engine.FLOWS, missing=None)
    start(harness, packet_path="flows")
    assert harness.datapath.conntrack
    assert "conntrack" not in harness.datapath.settings["flags"]


def test_missing(harness: Harness) -> None:
    """Where conntrack cannot be used, programs without it are loaded."""
    harness.engine = EngineChoice(AUTO, missing="no functions")
    start(harness)
    assert not harness.datapath.conntrack
    assert "conntrack" not in harness.datapath.settings["flags"]


def test_rejected_programs(harness: Harness) -> None:
    """Auto goes on without conntrack, and says why."""
    harness.datapath.rejects_conntrack = REJECTED
    harness.engine = EngineChoice(AUTO, missing=None)
    start(harness)
    assert not harness.datapath.conntrack
    assert "conntrack" not in harness.datapath.settings["flags"]
    path = harness.agent.status.packet_path
    assert path is not None
    assert path.engine is Engine.FLOWS
    assert path.reason.endswith("too large")


def test_rejected_programs_that_were_chosen(harness: Harness) -> None:
    """Who chose conntrack gets the error, and nothing else instead."""
    harness.datapath.rejects_conntrack = REJECTED
    harness.engine = EngineChoice(Engine.CONNTRACK, missing=None)
    harness.options = replace(harness.options, packet_path="conntrack")
    harness.start()
    harness.thread.join(60)
    assert harness.error is REJECTED
