# SPDX-License-Identifier: Apache-2.0
"""A TCP connection keeps its backend until it ends, whatever changes in the service."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from ebpflb.entries.flows import FlowKind
from tests.packet.frames import at, destination, ends, reply, segment, source
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import address, serve, shake, written


@pytest.fixture
def where(node: PacketNode, places: Places, kind: str) -> str:
    return serve(node, places, kind, cluster=[at(places.there, 8080)])


def replace(node: PacketNode, places: Places, kind: str) -> None:
    """Let another backend take new connections; the old backend keeps its existing ones."""
    there, elsewhere = at(places.there, 8080), at(places.elsewhere, 8080)
    serve(node, places, kind, cluster=[elsewhere], leaving=[there])


def test_a_connection_keeps_its_backend(
    node: PacketNode, places: Places, client: str, kind: str, where: str
) -> None:
    """A connection keeps its backend if it leaves the service, or the service is deleted."""
    got = ends(shake(node, client, where))
    other = at(places.elsewhere, 8080)
    changes: list[dict[str, Any]] = [
        {"cluster": [other], "leaving": [at(places.there, 8080)]},
        {"cluster": [other]},
        {"cluster": []},
    ]
    for lists in changes:
        serve(node, places, kind, **lists)
        asked = node.through(segment(client, where, "PA", payload=b"GET /"))
        assert ends(asked) == got
        assert ends(node.through(reply(asked, "PA"))) == f"{where} > {client}"
    node.withdraw(written(places, kind))
    asked = node.through(segment(client, where, "PA", payload=b"GET /"))
    assert ends(asked) == got
    assert ends(node.through(reply(asked, "PA"))) == f"{where} > {client}"


def test_repeated_syn(node: PacketNode, places: Places, client: str, kind: str, where: str) -> None:
    """A repeated SYN goes to the same backend, with the same addresses."""
    got = ends(node.through(segment(client, where)))
    replace(node, places, kind)
    assert ends(node.through(segment(client, where))) == got
    assert node.maps["service_stats"].get(1)[0] == 1


def test_syn_to_nobody(
    node: PacketNode, places: Places, client: str, kind: str, where: str
) -> None:
    """If the silent backend is removed, the next SYN goes to an existing backend."""
    node.through(segment(client, where))
    serve(node, places, kind, cluster=[at(places.elsewhere, 8080)])
    asked = node.through(segment(client, where))
    assert destination(asked) == at(places.elsewhere, 8080)
    assert ends(node.through(reply(asked))) == f"{where} > {client}"


def wait(node: PacketNode, seconds: int) -> None:
    """Make all TCP state of the node this old."""
    table, past = node.maps["tcp_flows"], max(0, time.monotonic_ns() - seconds * 10**9)
    for key, flow in table.items():
        table.write([(key, flow._replace(last_seen=past, created=past))])


@pytest.mark.parametrize(("seconds", "seen"), [(1, "node"), (4, "client")])
def test_syn_in_vain(
    node: PacketNode, client: str, kind: str, where: str, seconds: int, seen: str
) -> None:
    """After 3 s without an answer a SYN opens a new flow, masqueraded by the current rules."""
    node.settings("masquerade_all")
    first = node.through(segment(client, where))
    node.settings(flags=frozenset({"detect_local"}))
    wait(node, seconds)
    asked = node.through(segment(client, where))
    needs_snat = seen == "node" or kind == "nodeport"
    assert (source(asked) == client) is not needs_snat
    assert seen == "client" or asked == first
    assert ends(node.through(reply(asked))) == f"{where} > {client}"
    made, ended, _, _ = node.flow_counters()
    assert made - ended == len(node.flows()) == (4 if needs_snat else 2)


def test_syn_answered(node: PacketNode, client: str, kind: str, where: str) -> None:
    """A SYN does not move a connection whose backend may have answered."""
    first = node.through(segment(client, where))
    node.through(reply(first))
    wait(node, 4)
    assert ends(node.through(segment(client, where))) == ends(first)
    assert ends(node.through(segment(client, where, "A", seq=1001, ack=5001))) == ends(first)


def test_no_vain_connection(
    node: PacketNode, places: Places, client: str, kind: str, where: str
) -> None:
    """After the backend has answered the client, no SYN moves the connection, however old it is."""
    got = ends(shake(node, client, where))
    replace(node, places, kind)
    wait(node, 30)
    assert ends(node.through(segment(client, where))) == got


def finish(node: PacketNode, client: str, where: str) -> None:
    """Close the connection from both sides."""
    asked = node.through(segment(client, where, "FA", seq=1001, ack=5001))
    node.through(reply(asked, "FA"))
    node.through(segment(client, where, "A", seq=1002, ack=5002))


def abort(node: PacketNode, client: str, where: str) -> None:
    node.through(segment(client, where, "R", seq=1001))


def abort_there(node: PacketNode, client: str, where: str) -> None:
    node.through(reply(node.through(segment(client, where, "A", seq=1001)), "R"))


@pytest.mark.parametrize("end", [finish, abort, abort_there])
def test_chosen_anew(
    node: PacketNode, places: Places, client: str, kind: str, where: str, end: Callable[..., None]
) -> None:
    """After its end the same client port opens a new connection, to a current endpoint."""
    shake(node, client, where)
    end(node, client, where)
    replace(node, places, kind)
    asked = node.through(segment(client, where, seq=9000))
    assert destination(asked) == at(places.elsewhere, 8080)
    assert ends(node.through(reply(asked))) == f"{where} > {client}"
    assert destination(shake(node, client, where)) == at(places.elsewhere, 8080)


@pytest.mark.parametrize("flags", ["A", "PA", "FA", "R", "RA", "SA", ""])
def test_packets_of_no_connection_pass(
    node: PacketNode, places: Places, client: str, where: str, flags: str
) -> None:
    """A packet that opens no connection and belongs to none passes: conntrack may know it."""
    packet = segment(client, where, flags)
    assert node.ingress(packet) == ("pass", bytes(packet), {"passed": 1})
    assert not node.flows()


def test_new_and_replaced_entries_are_counted(
    node: PacketNode, places: Places, client: str, kind: str, where: str
) -> None:
    """Every new entry is counted, and so is every entry that a newer flow replaces."""
    shake(node, client, where)
    assert len(node.flows()) == (2 if kind == "cluster" else 4)
    assert node.flow_counters() == (len(node.flows()), 0, 0, 0)
    abort(node, client, where)
    replace(node, places, kind)
    shake(node, client, where)
    assert len(node.flows()) == (2 if kind == "cluster" else 4)
    made, ended, full, _ = node.flow_counters()
    assert made - ended == len(node.flows())
    assert ended and not full
    assert not node.flows("udp")


def test_each_packet_updates_its_entry(node: PacketNode, client: str, where: str) -> None:
    asked = node.through(segment(client, where))
    wait(node, 1)
    first = node.flows()
    node.through(reply(asked))
    node.through(segment(client, where, "A"))
    for name, flow in node.flows().items():
        assert flow.last_seen > first[name].last_seen
        assert flow.created == first[name].created


@pytest.mark.parametrize("first", ["nodeport", "cluster"])
def test_frontends_in_turn(node: PacketNode, places: Places, first: str) -> None:
    """A new connection by another frontend replaces all entries of an ended one with the same port.

    The new connection is masqueraded by a NodePort, but not by a cluster IP.
    """
    client, backend = at(places.pod, 50123), at(places.there, 8080)
    serve(node, places, "nodeport", service=1, cluster=[backend])
    serve(node, places, "cluster", service=2, cluster=[backend])
    kinds = ["nodeport", "cluster"] if first == "nodeport" else ["cluster", "nodeport"]
    for kind in kinds * 2:
        where = address(places, kind)
        shake(node, client, where)
        finish(node, client, where)
        left = [flow for flow in node.flows().values() if flow.kind != FlowKind.RESTING]
        assert len(left) == (2 if kind == "cluster" else 4)
