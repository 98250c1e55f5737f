# SPDX-License-Identifier: Apache-2.0
"""Programs free masquerade ports after conntrack's timeouts, in agreement with the sweeps."""

import time
from typing import NamedTuple

import pytest

from ebpflb.entries.flows import FlowState, Timeouts, state
from ebpflb.model.services import Protocol
from tests.packet.aging import MONOTONIC_COARSE, forget, idle, table_of
from tests.packet.frames import Packet, at, ends, opening, port_of, reply, segment, source
from tests.packet.node import PacketNode
from tests.packet.places import IPV4, Places
from tests.packet.services import serve

PORT, PORT_TRIES = 40_000, 16  # bpf/engine/flows/port.h
TIMES = Timeouts(established=600, close_wait=300)


class Stands(NamedTuple):
    """How a flow gets into a state: the packets after its first one, and how long the state
    lasts.
    """

    protocol: str
    found: FlowState
    seconds: int
    flags: str = ""  # of segments: small letters for the client's, capitals for the backend's
    lasted: float = 0
    keeps: bool = False

    @property
    def limit(self) -> int:
        """Return when the sweeps delete the whole flow, including the port of a closed one."""
        ends_as = FlowState.RESTING if self.found is FlowState.CLOSED else self.found
        return TIMES.seconds[Protocol[self.protocol.upper()]][ends_as]


STATES = [
    Stands("tcp", FlowState.OPENING, 5),
    Stands("tcp", FlowState.ANSWERED, 60, "S"),
    Stands("tcp", FlowState.OPEN, 600, "Sa", keeps=True),
    Stands("tcp", FlowState.CLOSING, 300, "SaF", keeps=True),
    Stands("tcp", FlowState.CLOSED, 120, "SaFf"),
    Stands("tcp", FlowState.RESET, 10, "Sar"),
    Stands("udp", FlowState.ONE_WAY, 30),
    Stands("udp", FlowState.ONE_WAY, 30, lasted=10),
    Stands("udp", FlowState.BOTH_WAYS, 30, "S"),
    Stands("udp", FlowState.STREAM, 120, "S", lasted=10, keeps=True),
    Stands("sctp", FlowState.OPENING, 5),
    Stands("sctp", FlowState.ANSWERED, 60, "S"),
]


def talk(node: PacketNode, stands: Stands, client: str, where: str) -> Packet:
    """Bring a flow into its state; return its first packet as the backend got it."""
    asked = node.through(opening(stands.protocol, client, where))
    for letter in stands.flags:
        if letter == "S":
            node.through(reply(asked))
        elif letter.isupper():
            node.through(reply(asked, letter + "A"))
        else:
            node.through(segment(client, where, letter.upper() + ("" if letter == "a" else "A")))
    return asked


def first_packet(node: PacketNode, protocol: str, client: str, where: str) -> dict[str, int]:
    """Return the result of egress for another client's first packet."""
    came = node.ingress(opening(protocol, client, where))
    return node.egress(came.packet).verdicts


@pytest.fixture
def where(node: PacketNode, places: Places, request: pytest.FixtureRequest) -> str:
    """Return a NodePort whose backend is on another node, on a node with one masquerade port."""
    node.settings("detect_local", first_port=PORT, last_port=PORT)
    node.maps["timeouts"].write(list(TIMES.table.items()))
    protocol = request.getfixturevalue("stands").protocol
    return serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])


@pytest.mark.parametrize("stands", STATES, ids=str)
def test_idle_flow_gives_its_port(
    node: PacketNode, places: Places, stands: Stands, where: str
) -> None:
    """A flow that was idle for conntrack's timeout loses its port and all its entries; an open flow
    used within two minutes never does.
    """
    client, other = at(places.client, 2001), at(places.other_client, 2002)
    assert stands.limit == stands.seconds
    talk(node, stands, client, where)
    idle(node, stands.protocol, min(stands.limit, 120) - 1, stands.lasted)
    early = "ports_exhausted" if stands.keeps else "port_taken_over"
    assert first_packet(node, stands.protocol, other, where) == {early: 1}
    forget(node, stands.protocol)
    talk(node, stands, client, where)
    idle(node, stands.protocol, stands.limit + 1, stands.lasted)
    before = entries_counted(node, stands.protocol) - len(node.flows(stands.protocol))
    assert first_packet(node, stands.protocol, other, where) == {"masqueraded": 1}
    left = node.flows(stands.protocol)
    assert len(left) == 4
    assert not [ends_ for ends_ in left if client in ends_]
    assert entries_counted(node, stands.protocol) - before == 4


def entries_counted(node: PacketNode, protocol: str) -> int:
    made, ended, *_ = node.flow_counters(protocol)
    return made - ended


@IPV4
@pytest.mark.parametrize("stands", STATES, ids=str)
def test_sweeps_agree(node: PacketNode, places: Places, stands: Stands, where: str) -> None:
    """The sweeps see the same state as the programs, and delete a flow when a program would take
    its port.
    """
    talk(node, stands, at(places.client, 2001), where)
    for seconds, gone in ((stands.limit - 1, False), (stands.limit + 1, True)):
        idle(node, stands.protocol, seconds, stands.lasted)
        entries = dict(node.maps[table_of(stands.protocol)].items())
        assert state(Protocol[stands.protocol.upper()], entries.values()) is stands.found
        now = time.clock_gettime_ns(MONOTONIC_COARSE)
        swept = list(TIMES.expired(entries.items(), entries.get, now))
        assert bool(swept and not swept[0].rest) is gone


@pytest.mark.parametrize("stands", [STATES[8]], ids=str)
def test_least_lately_used(node: PacketNode, places: Places, stands: Stands, where: str) -> None:
    """If no flow has been idle long enough, the least recently used one loses its port."""
    node.settings("detect_local", first_port=PORT, last_port=PORT + 1)
    first, second, third = (at(places.client, 2000 + number) for number in range(3))
    port = source(talk(node, stands, first, where))
    idle(node, "udp", 2)
    kept = source(talk(node, stands, second, where))
    assert source(talk(node, stands, third, where)) == port != kept
    left = node.flows("udp")
    assert not [ends_ for ends_ in left if first in ends_]
    assert len([ends_ for ends_ in left if second in ends_ or kept in ends_]) == 4


@pytest.mark.parametrize("stands", [STATES[2], STATES[9]], ids=["tcp", "udp"])
def test_the_only_idle_flow_is_found(
    node: PacketNode, places: Places, stands: Stands, where: str
) -> None:
    """If one of the tried ports has no open flow, this port is found, and no new flow is
    dropped.
    """
    node.settings("detect_local", first_port=PORT, last_port=PORT + PORT_TRIES - 1)
    for number in range(PORT_TRIES - 1):
        talk(node, stands, at(places.client, 2001 + number), where)
    idle(node, stands.protocol, 1, stands.lasted)
    assert first_packet(node, stands.protocol, at(places.other_client, 3000), where) == {
        "masqueraded": 1
    }
    for number in range(20):
        other = at(places.other_client, 3001 + number)
        assert first_packet(node, stands.protocol, other, where) == {"port_taken_over": 1}


CLOSED = [Stands("tcp", FlowState.CLOSED, 120, "SaFf")]


@pytest.mark.parametrize("stands", CLOSED, ids=["closed"])
def test_closed_port_rests(node: PacketNode, places: Places, stands: Stands, where: str) -> None:
    """A closed connection's port is not reused while other ports are free, even by the same client
    port; its late packets go to the stack, not to the client.
    """
    client = at(places.client, 2001)
    asked = talk(node, stands, client, where)
    node.settings("detect_local", first_port=PORT, last_port=PORT + 49)
    again = [node.through(opening("tcp", client, where))]
    again += [
        node.through(opening("tcp", at(places.other_client, 3000 + n), where)) for n in range(20)
    ]
    assert source(asked) == at(places.node, PORT)
    assert source(asked) not in set(map(source, again))
    late = node.ingress(reply(asked, "FA"))
    assert (late.action, late.verdicts) == ("pass", {"passed": 1})
    assert ends(late.packet) == ends(reply(asked))


@pytest.mark.parametrize("stands", CLOSED, ids=["closed"])
def test_resting_port_comes_free(
    node: PacketNode, places: Places, stands: Stands, where: str
) -> None:
    """The port of a closed connection is free after two minutes, and before that as the last
    resort.
    """
    talk(node, stands, at(places.client, 2001), where)
    node.settings("detect_local", first_port=PORT + 1, last_port=PORT + 1)
    node.through(opening("tcp", at(places.client, 2001), where))
    node.settings("detect_local", first_port=PORT, last_port=PORT)
    idle(node, "tcp", 119)
    assert first_packet(node, "tcp", at(places.other_client, 2002), where) == {"port_taken_over": 1}
    forget(node, "tcp")
    talk(node, stands, at(places.client, 2001), where)
    idle(node, "tcp", 121)
    assert first_packet(node, "tcp", at(places.other_client, 2002), where) == {"masqueraded": 1}


@pytest.mark.parametrize("stands", [STATES[0], STATES[6], STATES[10]], ids=["tcp", "udp", "sctp"])
@pytest.mark.parametrize(
    ("port", "least", "most"), [(1, 1, 511), (511, 1, 511), (512, 600, 1023), (1023, 600, 1023)]
)
def test_privileged_port_stays_privileged(
    node: PacketNode, places: Places, stands: Stands, where: str, port: int, least: int, most: int
) -> None:
    """A port below 512 is replaced by one below 512, and a port below 1024 by one below 1024, as in
    the kernel's NAT.
    """
    ports = {
        port_of(source(node.through(opening(stands.protocol, at(client, port), where))))
        for client in (places.client, places.other_client, places.other_node)
    }
    assert len(ports) == 3
    assert least <= min(ports) <= max(ports) <= most
