# SPDX-License-Identifier: Apache-2.0
"""The engine that translates new flows of packets, and the reason."""

import pytest

from ebpflb.errors import NodeError
from ebpflb.model.packet_path import PACKET_PATHS, Engine, decide


@pytest.mark.parametrize(
    ("chosen", "missing", "unsuited", "engine", "reason"),
    [
        ("auto", None, None, Engine.NETFILTER, "NAT works"),
        ("auto", "no nf_tables", None, Engine.FLOWS, "no nf_tables"),
        ("auto", None, "a bridge", Engine.FLOWS, "a bridge"),
        ("auto", "no nf_tables", "a bridge", Engine.FLOWS, "no nf_tables"),
        ("flows", None, None, Engine.FLOWS, "--packet-path"),
        ("netfilter", None, None, Engine.NETFILTER, "--packet-path"),
        ("netfilter", None, "a bridge", Engine.NETFILTER, "although a bridge"),
    ],
)
def test_decision(
    chosen: str, missing: str | None, unsuited: str | None, engine: Engine, reason: str
) -> None:
    """Auto takes netfilter unless it cannot work here, or should not be used here."""
    path = decide(chosen, missing=missing, unsuited=unsuited)
    assert path.engine == engine
    assert reason in path.reason


def test_netfilter_that_cannot_work() -> None:
    """An engine that was chosen and cannot work is an error; no other one takes its place."""
    with pytest.raises(NodeError, match=r"--packet-path=netfilter cannot work.*no nf_tables"):
        decide("netfilter", missing="no nf_tables")


def test_former_name() -> None:
    """The status of an earlier agent names the engine as it was called then."""
    assert Engine("conntrack") is Engine.NETFILTER
    with pytest.raises(ValueError, match="iptables"):
        Engine("iptables")


def test_choices() -> None:
    """The choices are the option's words."""
    assert PACKET_PATHS == ("auto", "netfilter", "flows")
