# SPDX-License-Identifier: Apache-2.0
"""`ebpflb doctor`'s own connections with other options of the agent."""

from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from tests.cli.doctors import canaries, left, ok, published


def test_conntrack(tmp_path: Path) -> None:
    """The same where conntrack keeps the flows."""
    with published(tmp_path, engine=Engine.NETFILTER) as cluster:
        assert ok(canaries(cluster)) == ["sockets", "packets", "NodePorts", "uplinks"]
        wait_until("all is gone", lambda: left(cluster) == [])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--shadow", "the agent runs with --shadow"),
        ("--namespaces=default", "the agent serves some Services only"),
        ("--devices=eth*", "--devices=eth* leaves out doctor's own device"),
    ],
)
def test_not_tried(tmp_path: Path, option: str, said: str) -> None:
    """A sentence, as a warning, where an option of the agent leaves nothing to try."""
    with published(tmp_path, option) as cluster:
        found = canaries(cluster)
    warning = found.get("canary") or found["canary: packets"]
    assert not warning["required"] and warning["detail"].startswith(f"not tried: {said}"), found
