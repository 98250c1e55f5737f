# SPDX-License-Identifier: Apache-2.0
"""Flows that the agent has marked, as their endpoint has gone (ebpflb/agent/on_removal): what the
client sends is answered by a reset; what the backend sends, and the client's resets, go through.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ebpflb.agent.on_removal.reset_worker import FrontendNames
from ebpflb.agent.on_removal.resets import GONE_FLAG, FlowConnections
from ebpflb.entries.flows import FlowKind
from ebpflb.kernel import bpf
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import FrameProgram
from tests.packet.calls import after_each_call
from tests.packet.frames import (
    Packet,
    at,
    destination,
    ends,
    opening,
    port_of,
    reply,
    segment,
    source,
    transport,
)
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import KINDS, serve

pytestmark = pytest.mark.parametrize("kind", KINDS)
RST, MSS = 4, 1400


def mark(node: PacketNode) -> None:
    """Mark the flow like the agent does."""
    flows = node.maps["tcp_flows"]
    for key, flow in list(flows.items()):
        if flow.kind == FlowKind.DNAT:
            flows.write([(key, flow._replace(flags=flow.flags | GONE_FLAG))])


def open_flow(
    node: PacketNode, places: Places, kind: str, *, marked: bool = True
) -> tuple[str, str, Packet]:
    """The client, the frontend, and the request as the backend has got it."""
    client = at(places.client, 50123)
    where = serve(node, places, kind, cluster=[at(places.there, 8080)])
    asked = node.through(opening("tcp", client, where))
    node.through(reply(asked))
    node.through(segment(client, where, "A", seq=5001, ack=1))
    if marked:
        mark(node)
    return client, where, asked


@pytest.mark.parametrize("flags", ["A", "PA", "FA", "SA"])
def test_the_client_is_answered_by_a_reset_with_the_number_that_it_awaits(
    node: PacketNode, places: Places, kind: str, flags: str
) -> None:
    """Each time; whatever the length of its segment."""
    client, where, _ = open_flow(node, places, kind)
    for size in (0, 1, MSS):
        came = node.ingress(segment(client, where, flags, seq=5001, ack=77, payload=bytes(size)))
        assert (came.action, came.verdicts) == ("redirect", {"endpoint_gone": 1})
        answer = came.packet
        assert ends(answer) == f"{where} > {client}"
        assert (int(transport(answer).flags), transport(answer).seq) == (RST, 77)
        assert not bytes(transport(answer).payload)


def test_resets_of_the_client_reach_the_backend_and_its_segments_the_client(
    node: PacketNode, places: Places, kind: str
) -> None:
    """The client answers what the backend still sends by a reset with the number of that."""
    client, where, asked = open_flow(node, places, kind)
    said = node.through(segment(destination(asked), source(asked), "PA", seq=1, ack=5001))
    assert ends(said) == f"{where} > {client}"
    reset = node.through(segment(client, where, "R", seq=5001))
    assert ends(reset) == ends(asked)


def test_a_new_connection_from_the_same_port_is_translated_anew(
    node: PacketNode, places: Places, kind: str
) -> None:
    client, where, _ = open_flow(node, places, kind)
    asked = node.through(opening("tcp", client, where))
    assert destination(asked) == at(places.there, 8080)
    assert not any(flow.flags & GONE_FLAG for flow in node.flows().values())


def test_a_flow_counts_as_reset_from_the_first_answer_on(
    node: PacketNode, places: Places, kind: str
) -> None:
    """From the first answer on a flow counts as reset, so sweeps delete it soon, but not before."""
    client, where, _ = open_flow(node, places, kind)
    assert not any("rst" in flow.flags for flow in node.flows().values())
    node.ingress(segment(client, where, "A", seq=5001, ack=77))
    (request,) = [flow for flow in node.flows().values() if flow.flags & GONE_FLAG]
    assert "rst" in request.flags


class Wanted(FrontendNames):
    """The connections to one port; ``looked_at`` is called for each that was read."""

    def __init__(self, port: int, looked_at: Callable[[], None]) -> None:
        self.port, self.looked_at = port, looked_at

    @property
    def ports(self) -> frozenset[int]:
        return frozenset({self.port})

    def has(self, *_: object) -> bool:
        self.looked_at()
        return True


def test_a_port_used_again_before_the_old_flow_is_marked(
    node: PacketNode, places: Places, kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new connection replaces the flow that the agent has read: it is not marked.

    Its packets are translated after each system call of the agent.
    """
    backend, client = at(places.there, 8080), at(places.client, 50123)
    where = serve(node, places, kind, cluster=[backend])
    call, passed = bpf.bpf, list[str]()

    def connect() -> None:
        asked = node.through(opening("tcp", client, where))
        node.through(reply(asked))
        node.through(segment(client, where, "A"))

    def connect_again() -> None:
        node.through(segment(client, where, "RA"))
        connect()
        after_each_call(monkeypatch, send)

    def send() -> None:
        passed.append(destination(node.through(segment(client, where, "PA"))))

    connect()
    with closing(FrameProgram(precompile.FLOW_END, node.maps, cache)) as program:
        connections = FlowConnections(node.maps, program.run)
        wanted = Wanted(port_of(where), connect_again)
        assert not connections.reset(wanted, is_last=True)
    monkeypatch.setattr(bpf, "bpf", call)
    assert set(passed) == {backend}
    assert not any(flow.flags & GONE_FLAG for flow in node.flows().values())


def test_the_flow_is_marked(node: PacketNode, places: Places, kind: str, cache: Path) -> None:
    """The agent marks the request's entry, and changes nothing else of the flow."""
    client, where, _ = open_flow(node, places, kind, marked=False)
    before = node.flows()
    with closing(FrameProgram(precompile.FLOW_END, node.maps, cache)) as program:
        connections = FlowConnections(node.maps, program.run)
        connections.reset(Wanted(port_of(where), lambda: None), is_last=True)
    marked = {
        key: flow._replace(flags=flow.flags | GONE_FLAG) if flow.kind == FlowKind.DNAT else flow
        for key, flow in before.items()
    }
    assert node.flows() == marked
    assert node.ingress(segment(client, where, "A")).verdicts == {"endpoint_gone": 1}
