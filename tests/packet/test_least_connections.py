# SPDX-License-Identifier: Apache-2.0
"""Flows of services with the scheduler least-connections: each flow is counted while it is open."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from ebpflb.agent.missed_ends import EndedConnections
from ebpflb.entries.flows import FlowKind, Hook, Tuple
from tests.packet.frames import Packet, at, destination, opening, reply, segment
from tests.packet.node import PacketNode
from tests.packet.places import V4, Places
from tests.packet.services import serve

WORD = "least_connections"


@pytest.fixture
def sweep(node: PacketNode, cache: Path) -> Iterator[EndedConnections]:
    found = EndedConnections(node.maps, cache)
    yield found
    found.stop()


def backends(places: Places, count: int = 2) -> list[str]:
    return [at(host, 8080) for host in (places.there, places.elsewhere)[:count]]


def counted(node: PacketNode) -> dict[int, int]:
    """Return the nonzero counts by backend id."""
    return {id: found.open for id, found in node.maps["backend_loads"].items() if found.open}


def held(node: PacketNode) -> dict[int, int]:
    return dict(Counter(each.backend for _, each in node.maps["connections"].items()))


def alive(node: PacketNode, protocol: str = "tcp") -> dict[int, int]:
    """Return the same counts from the flows that exist and have not ended, each by its request's
    entry.
    """
    found: Counter[int] = Counter()
    table = node.maps["tcp_flows" if protocol == "tcp" else "other_flows"]
    entries = dict(table.items())
    for flow in entries.values():
        if flow.kind == FlowKind.DNAT and flow.connection:
            sides = [each.flags for each in entries.values() if each.connection == flow.connection]
            ended = any("rst" in flags for flags in sides) or all("fin" in it for it in sides)
            found[flow.backend] += not ended
    return dict(+found)


def clients(places: Places, count: int, first: int = 50_000) -> list[str]:
    return [at(places.client, first + number) for number in range(count)]


def established(node: PacketNode, client: str, where: str) -> Packet:
    """Return the client's ACK as the backend gets it."""
    node.through(reply(node.through(segment(client, where))))
    return node.through(segment(client, where, "A", seq=1001, ack=5001))


def test_the_next_flow_goes_to_the_backend_with_fewer(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """Two backends are compared for each new flow; further packets of a flow are not counted."""
    where = serve(node, places, "nodeport", protocol, WORD, cluster=backends(places))
    for number, client in enumerate(clients(places, 12), 1):
        first, again = (node.ingress(opening(protocol, client, where)).packet for _ in range(2))
        assert destination(first) == destination(again)
        loads = sorted(counted(node).values())
        assert sum(loads) == number
        assert loads[-1] - loads[0] == number % 2 or number == 1
        assert counted(node) == held(node) == alive(node, protocol)


def test_a_connection_that_goes_on_after_a_reset_counts_again(
    node: PacketNode, places: Places
) -> None:
    """A reset may be forged: the receiver's next segment shows this, and the connection counts
    again.
    """
    where = serve(node, places, "nodeport", "tcp", WORD, cluster=backends(places))
    (client,) = clients(places, 1)
    established(node, client, where)
    node.through(segment(client, where, "R", seq=1001))
    assert not counted(node)
    node.through(segment(client, where, "PA", seq=1001, ack=5001, payload=b"GET /"))
    assert list(counted(node).values()) == [1]
    assert counted(node) == held(node) == alive(node)


def test_a_direct_connection_counts_nothing(node: PacketNode, places: Places) -> None:
    """A direct connection from a flow's port to the same backend gets another port, and is not
    counted.
    """
    where = serve(node, places, "cluster", "tcp", WORD, cluster=backends(places, 1))
    client = at(places.pod, 50123)
    node.ingress(segment(client, where), "pods")
    assert sum(counted(node).values()) == 1
    node.ingress(segment(client, backends(places, 1)[0]), "pods")
    assert sum(counted(node).values()) == 1


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_what_an_lru_or_a_sweep_takes_is_ended_by_the_agent(
    node: PacketNode, places: Places, sweep: EndedConnections, protocol: str
) -> None:
    """The agent ends a connection at the second sweep that misses it; existing connections stay."""
    where = serve(node, places, "nodeport", protocol, WORD, cluster=backends(places))
    for client in clients(places, 6):
        node.ingress(opening(protocol, client, where))
    table = node.maps["tcp_flows" if protocol == "tcp" else "other_flows"]
    lost = clients(places, 6)[:2]
    gone = [key for key, _ in table.items() if _client(key) in lost]
    table.delete(gone)
    assert sum(counted(node).values()) == 6
    assert [sweep.sweep(), sweep.sweep(), sweep.sweep()] == [0, 2, 0]
    assert counted(node) == held(node) == alive(node, protocol)
    assert sum(counted(node).values()) == 4


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_full_map_costs_the_count_alone(node: PacketNode, places: Places, protocol: str) -> None:
    """A flow without room is served, but only counted as uncounted."""
    where = serve(node, places, "nodeport", protocol, WORD, cluster=backends(places))
    first, second = clients(places, 2)
    node.ingress(opening(protocol, first, where))
    connections = node.maps["connections"]
    ((key, value),) = connections.items()
    numbers = range(key.socket + 1000, key.socket + 1000 + connections.spec.entries - 1)
    connections.write([(key._replace(socket=number), value) for number in numbers])
    assert node.ingress(opening(protocol, second, where)).verdicts == {"translated": 1}
    assert sum(counted(node).values()) == 1
    assert sum(each.uncounted for _, each in node.maps["backend_loads"].items()) == 1


def _client(key: Tuple) -> str:
    if key.hook == Hook.INGRESS:
        return at(str(key.source), key.source_port)
    return at(str(key.destination), key.destination_port)


def test_where_a_removed_backends_id_is_used_again_old_flows_do_not_count(
    node: PacketNode, places: Places
) -> None:
    where = serve(node, places, "nodeport", "tcp", WORD, cluster=backends(places, 1))
    old, new = clients(places, 2)
    established(node, old, where)
    ((id, former),) = [it for it in node.maps["backend_loads"].items() if it[1].open]
    renewed = former._replace(open=0, generation=former.generation + 1)
    node.maps["backend_loads"].write([(id, renewed)])
    established(node, new, where)
    node.through(segment(old, where, "R", seq=1001))
    assert counted(node) == {id: 1}
    node.through(segment(new, where, "R", seq=1001))
    assert not counted(node)
    assert not held(node)


steps = some.tuples(
    some.integers(0, 4),
    some.sampled_from(["syn", "answer", "ack", "fin", "fin back", "reset", "reset back", "sweep"]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(order=some.lists(steps, max_size=30))
def test_counts_are_the_open_flows_after_any_sequence(
    node: PacketNode, sweep: EndedConnections, order: list[tuple[int, str]]
) -> None:
    """Counts equal the number of open flows after any sequence of segments and sweeps."""
    node.__init__(node.maps, node.hooks, node.devices)  # type: ignore[misc]
    where = serve(node, V4, "nodeport", "tcp", WORD, cluster=backends(V4))
    asked: dict[str, Packet] = {}
    for number, what in order:
        client = clients(V4, 5)[number]
        if what == "sweep":
            sweep.sweep()
        elif what == "syn":
            outcome = node.ingress(segment(client, where))
            if outcome.action == "pass":
                asked[client] = node.egress(outcome.packet).packet
        elif client in asked:
            _send(node, client, where, what, asked[client])
        assert counted(node) == held(node) == alive(node)


def _send(node: PacketNode, client: str, where: str, what: str, asked: Packet) -> None:
    words = {"answer": "SA", "fin back": "FA", "reset back": "R"}
    if what in words:
        node.egress(node.ingress(reply(asked, words[what])).packet)
    elif what == "reset":
        node.ingress(segment(client, where, "R", seq=1001))
    else:
        node.ingress(segment(client, where, "A" if what == "ack" else "FA", seq=1001, ack=5001))
