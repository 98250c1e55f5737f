# SPDX-License-Identifier: Apache-2.0
"""While the flow tables are known to be empty, no packet is looked up in them."""

from collections.abc import Callable

import pytest

from ebpflb.entries.flows import Timeouts
from ebpflb.kernel.maps.sweep import Sweeper
from tests.packet.frames import at, ends, opening, reply
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


@pytest.fixture
def node(node: PacketNode) -> PacketNode:
    node.put("flow_gate", 0, (0, 0, 0))
    return node


@pytest.fixture
def sweep(node: PacketNode) -> Callable[[], None]:
    """Sweep once, as the agent does every ten seconds."""
    sweeper = Sweeper(node.maps, Timeouts(), lambda _: 0)
    sweeper.pause = 0
    return sweeper.turn


def is_closed(node: PacketNode) -> bool:
    gate = node.maps["flow_gate"].get(0)
    return bool(gate.empty == gate.opened + 1)


def test_closed_after_two_sweeps(node: PacketNode, sweep: Callable[[], None]) -> None:
    """The gate closes only after two empty sweeps: a program may be writing an entry."""
    assert not is_closed(node)
    sweep()
    assert not is_closed(node)
    sweep()
    assert is_closed(node)


def test_opened_by_a_flow(
    node: PacketNode, places: Places, protocol: str, sweep: Callable[[], None]
) -> None:
    """A flow opens the gate before its first entry, so that all its packets are translated; it
    stays open while there is a flow, and for two more sweeps.
    """
    for _ in range(2):
        sweep()
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 8080)])
    client = at(places.pod, 50123)
    request = node.through(opening(protocol, client, where), "pods")
    assert not is_closed(node)
    assert ends(node.through(reply(request), "uplink", "pods")) == f"{where} > {client}"
    for _ in range(3):
        sweep()
    assert not is_closed(node)
    for table in ("tcp_flows", "other_flows"):
        node.maps[table].delete([key for key, _ in node.maps[table].items()])
    for closed in (False, False, True):
        assert is_closed(node) == closed
        sweep()


def test_opened_between_two_sweeps(
    node: PacketNode, places: Places, sweep: Callable[[], None]
) -> None:
    """A flow that existed between two sweeps counts: the next two sweeps must find nothing."""
    sweep()
    where = serve(node, places, "cluster", "tcp", cluster=[at(places.there, 8080)])
    node.ingress(opening("tcp", at(places.pod, 50123), where), "pods")
    node.maps["tcp_flows"].delete([key for key, _ in node.maps["tcp_flows"].items()])
    sweep()
    assert not is_closed(node)
    sweep()
    assert is_closed(node)


def test_a_closed_gate_hides_entries(
    node: PacketNode, places: Places, sweep: Callable[[], None]
) -> None:
    """With a closed gate, existing entries are not found, because no program looks."""
    where = serve(node, places, "cluster", "tcp", cluster=[at(places.there, 8080)])
    request = node.through(opening("tcp", at(places.pod, 50123), where), "pods")
    opened = node.maps["flow_gate"].get(0).opened
    node.put("flow_gate", 0, (opened, opened + 1, 0))
    answer = reply(request)
    assert node.ingress(answer).packet == answer
    assert node.egress(answer, "pods").packet == answer
