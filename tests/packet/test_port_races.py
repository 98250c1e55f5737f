# SPDX-License-Identifier: Apache-2.0
"""Of two flows that want one masquerade port on two CPUs at once, exactly one gets it. Two
datagrams that open one flow share its port.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ebpflb.entries.flows import FlowKind
from ebpflb.kernel.programs import loader
from tests.load import scaled
from tests.packet.aging import forget, idle
from tests.packet.frames import Ether, at, destination, forwarded, opening, reply, source
from tests.packet.node import ACTIONS, PacketNode, knows_ingress_device
from tests.packet.places import Places
from tests.packet.services import serve

PORT = 40_000
ROUNDS = scaled(100)


@pytest.fixture
def node(node: PacketNode) -> PacketNode:
    """Return a node with only one port for masqueraded flows."""
    node.settings(first_port=PORT, last_port=PORT)
    return node


@pytest.fixture
def cpus() -> Iterator[list[int]]:
    """Return two CPUs, if this process may use two."""
    usual = os.sched_getaffinity(0)
    yield (sorted(usual) * 2)[:2]
    os.sched_setaffinity(0, usual)


def rush(node: PacketNode, frames: list[bytes], cpus: list[int]) -> list[tuple[str, bytes]]:
    """Return the outcomes of requests that reach egress at once, each on its own CPU."""
    start = threading.Barrier(len(frames))
    uplink = node.devices["uplink"]
    came_by = uplink if knows_ingress_device() else 0

    def one(frame: bytes, cpu: int) -> tuple[str, bytes]:
        os.sched_setaffinity(0, {cpu})
        start.wait()
        ran = loader.run_program(
            node.hooks["egress"], frame, ifindex=uplink, ingress_ifindex=came_by
        )
        return ACTIONS[ran.retval], ran.packet

    with ThreadPoolExecutor(len(frames)) as threads:
        return list(threads.map(one, frames, cpus))


@pytest.mark.parametrize("held", [False, True], ids=["free", "idle"])
def test_one_of_two_gets_the_port(
    node: PacketNode, places: Places, cpus: list[int], held: bool
) -> None:
    """One of two requests gets the port, whether the port is free or taken over.

    The other request is dropped, unless it comes later. Then it takes the port over, as the last
    resort, and the entries of the first flow are gone.
    """
    where = serve(node, places, "nodeport", "udp", cluster=[at(places.there, 8080)])
    clients = [at(places.client, port) for port in (50123, 50124)]
    for _ in range(ROUNDS):
        forget(node, "udp")
        if held:
            node.through(opening("udp", at(places.client, 50125), where))
            idle(node, "udp", 31)
        frames = [
            bytes(forwarded(node.ingress(opening("udp", client, where)).packet))
            for client in clients
        ]
        results = rush(node, frames, cpus)
        left = [source(Ether(frame)) for action, frame in results if action == "pass"]
        assert set(left) == {at(places.node, PORT)}
        flows = node.flows("udp")
        (un_snat,) = [flow for flow in flows.values() if flow.kind == FlowKind.UN_SNAT]
        winner = at(str(un_snat.address), un_snat.port)
        by_snat = [name for name, flow in flows.items() if flow.kind == FlowKind.SNAT]
        assert by_snat == [f"egress {winner} > {at(places.there, 8080)}"]
        assert winner in clients


def test_a_port_that_is_being_given_is_not_taken(node: PacketNode, places: Places) -> None:
    """A port is not taken over while a CPU has written only the replies' entry."""
    where = serve(node, places, "nodeport", "udp", cluster=[at(places.there, 8080)])
    node.through(opening("udp", at(places.client, 50123), where))
    table = node.maps["other_flows"]
    table.delete([key for key, flow in table.items() if flow.kind == FlowKind.SNAT])
    came = node.ingress(opening("udp", at(places.client, 50124), where))
    late = node.egress(forwarded(came.packet))
    assert (late.action, late.verdicts) == ("drop", {"ports_exhausted": 1})
    idle(node, "udp", 2)
    assert node.egress(forwarded(came.packet)).action == "pass"


@pytest.mark.parametrize("ahead", ["reply", "ingress", "egress"])
def test_datagrams_of_one_flow_share_its_port(node: PacketNode, places: Places, ahead: str) -> None:
    """A second datagram of a flow may be handled before the first one's entry for requests is
    written; only the entry for replies exists. It opens no second flow, which would end the first
    one.
    """
    node.settings()
    where = serve(node, places, "nodeport", "udp", cluster=[at(places.there, 8080)])
    request = opening("udp", at(places.client, 50123), where)
    first = forwarded(node.ingress(request).packet)
    if ahead == "egress":
        first = node.egress(first).packet
    table = node.maps["other_flows"]
    later = {FlowKind.DNAT} | ({FlowKind.SNAT_PENDING} if ahead == "reply" else set())
    table.delete([key for key, flow in table.items() if flow.kind in later])
    second = node.through(request)
    if ahead != "egress":
        first = node.egress(first).packet
    assert source(first) == source(second) != at(places.client, 50123)
    back = node.through(reply(first))
    assert (source(back), destination(back)) == (where, at(places.client, 50123))
