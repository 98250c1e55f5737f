# SPDX-License-Identifier: Apache-2.0
"""Which engine opens flows of packets, and why."""

import pytest

from ebpflb.errors import NodeError
from ebpflb.model.packet_path import CHOICES, Engine, decide


@pytest.mark.parametrize(
    ("chosen", "missing", "unsuited", "engine", "reason"),
    [
        ("auto", None, None, Engine.CONNTRACK, "can be used"),
        ("auto", "no kfuncs", None, Engine.FLOWS, "no kfuncs"),
        ("auto", None, "a bridge", Engine.FLOWS, "a bridge"),
        ("auto", "no kfuncs", "a bridge", Engine.FLOWS, "no kfuncs"),
        ("flows", None, None, Engine.FLOWS, "--packet-path"),
        ("conntrack", None, None, Engine.CONNTRACK, "--packet-path"),
        ("conntrack", None, "a bridge", Engine.CONNTRACK, "although a bridge"),
    ],
)
def test_decision(
    chosen: str, missing: str | None, unsuited: str | None, engine: Engine, reason: str
) -> None:
    """Auto takes conntrack unless it cannot work here, or should not be used here."""
    path = decide(chosen, missing=missing, unsuited=unsuited)
    assert path.engine == engine
    assert reason in path.reason


def test_conntrack_that_cannot_work() -> None:
    """Who chooses it is told why it cannot be had, and gets nothing else instead."""
    with pytest.raises(NodeError, match=r"--packet-path=conntrack cannot work.*no kfuncs"):
        decide("conntrack", missing="no kfuncs")


def test_choices() -> None:
    """As the option names them."""
    assert CHOICES == ("auto", "conntrack", "flows")
