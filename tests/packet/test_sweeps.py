# SPDX-License-Identifier: Apache-2.0
"""Sweeps of the flow tables while packets pass: a new connection loses no packet."""

from pathlib import Path

import pytest

from ebpflb.entries.flows import Timeouts
from ebpflb.kernel.maps.sweep import SweptTable
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import FrameProgram
from tests.packet.aging import idle
from tests.packet.calls import after_each_call
from tests.packet.frames import at, destination, opening, reply, segment
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


def test_port_used_again_before_the_old_flow_is_removed(
    node: PacketNode, places: Places, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new connection replaces a flow that the sweep found expired: its packets pass.

    Its packets pass after each system call of the sweep, including those that reset the connection.
    """
    backend, client = at(places.there, 8080), at(places.client, 2001)
    where = serve(node, places, "nodeport", "tcp", cluster=[backend])
    program = FrameProgram(precompile.FLOW_END, node.maps, cache)
    table = SweptTable(node.maps, "tcp_flows", Timeouts(), program.run)
    count, passed = table.count, list[str]()

    def connect() -> None:
        asked = node.through(opening("tcp", client, where))
        node.through(reply(asked))
        node.through(segment(client, where, "A"))

    def connect_and_count(removed: int) -> None:
        monkeypatch.setattr(table, "count", count)
        connect()
        after_each_call(monkeypatch, send)
        count(removed)

    def send() -> None:
        passed.append(destination(node.through(segment(client, where, "RA"))))

    connect()
    node.through(segment(client, where, "RA"))
    idle(node, "tcp", 11)
    monkeypatch.setattr(table, "count", connect_and_count)
    for _ in table.sweep():
        pass
    program.close()
    assert passed
    assert set(passed) == {backend}
