# SPDX-License-Identifier: Apache-2.0
"""The engine netfilter: ingress changes no packet, and writes its choice to skb->priority."""

from itertools import pairwise

import pytest

from ebpflb.entries.services import CHOSEN_BAND, Chosen, id_of
from ebpflb.lab.agents import wait_until
from tests.packet.frames import Packet, at, datagram, ends, opening, reply, segment
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve, written

CLIENTS = range(50_000, 50_040)
FORGED = Chosen.PREFIX | 1
OTHERS = 0x00010002  # a class of someone else's


@pytest.fixture(params=["tcp", "udp"])
def protocol(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(params=[True, False], ids=["flows unknown", "no flows"])
def node(node: PacketNode, request: pytest.FixtureRequest) -> PacketNode:
    """Return a node without flows: most packets are handled by their tuple (path/repeated.h)."""
    node.settings("detect_local", "netfilter")
    node.put("flow_gate", 0, (0, 0 if request.param else 1, 0))
    return node


def chosen_id(node: PacketNode) -> int:
    """Return the backend id of the last packet; 0 if none was chosen."""
    if node.priority & Chosen.MASK != Chosen.PREFIX:
        assert node.priority == 0
        return 0
    return id_of(node.priority)


@pytest.mark.parametrize("masqueraded", [False, True])
def test_the_packet_that_opens_a_flow_stays_unchanged(
    node: PacketNode, places: Places, protocol: str, masqueraded: bool
) -> None:
    """The packet that opens a flow stays unchanged.

    Its priority names the backend, and says whether netfilter has to masquerade.
    """
    backend = at(places.there, 8080)
    where = serve(node, places, "nodeport", protocol, cluster=[backend, at(places.here, 8080)])
    node.publish(
        1,
        {written(places, "nodeport", protocol): "external"},
        cluster=[backend],
        here=[] if masqueraded else [backend],
    )
    request = opening(protocol, at(places.client, 50123), where)
    verdict = "masqueraded" if masqueraded else "translated"
    assert node.ingress(request) == ("pass", bytes(request), {verdict: 1})
    bit = Chosen.MASQUERADE if masqueraded else 0
    assert node.priority == Chosen.PREFIX | bit | node.backend_id(1, backend)
    assert not node.flows(protocol)


def test_a_pod_to_itself_is_masqueraded(node: PacketNode, places: Places, protocol: str) -> None:
    """A pod that is its own endpoint is masqueraded."""
    where = serve(node, places, "cluster", protocol, cluster=[at(places.pod, 8080)])
    node.ingress(opening(protocol, at(places.pod, 50123), where), "pods")
    assert node.priority & Chosen.MASQUERADE


def test_all_are_chosen(node: PacketNode, places: Places, protocol: str) -> None:
    """Each endpoint gets some of the clients."""
    backends = [at(places.there, port) for port in (1, 2, 3)]
    where = serve(node, places, "cluster", protocol, cluster=backends)
    got = set()
    for port in CLIENTS:
        node.ingress(opening(protocol, at(places.pod, port), where), "pods")
        got.add(chosen_id(node))
    assert got == {node.backend_id(1, each) for each in backends}


@pytest.mark.parametrize("device", ["uplink", "pods"])
def test_a_forged_choice_is_removed(node: PacketNode, places: Places, device: str) -> None:
    """A choice that no program wrote is removed; other programs' priorities stay."""
    other = segment(at(places.client, 50123), at(places.here, 80))
    assert node.ingress(other, device, priority=FORGED) == ("pass", bytes(other), {"passed": 1})
    assert node.priority == 0
    node.ingress(other, device, priority=OTHERS)
    assert node.priority == OTHERS


def test_chosen_at_a_port(node: PacketNode, places: Places, protocol: str) -> None:
    """If the program at a bridge's port has chosen a backend, the bridge does not choose again."""
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 1)])
    node.device("pods", places.bridge, places.bridge, "master")
    request = opening(protocol, at(places.pod, 50123), where)
    assert node.ingress(request, "pods", priority=FORGED) == ("pass", bytes(request), {})
    assert node.priority == FORGED
    node.ingress(request, "pods")
    assert chosen_id(node) == node.backend_id(1, at(places.there, 1))


def test_datagrams_of_a_flow(node: PacketNode, places: Places) -> None:
    """All datagrams of a flow get the same backend and count once.

    Another flow counts separately.
    """
    backends = [at(places.there, port) for port in (1, 2, 3)]
    where = serve(node, places, "cluster", "udp", "round_robin", cluster=backends)
    got = []
    for port in (50_000, 50_000, 50_000, 50_001, 50_000):
        node.ingress(datagram(at(places.pod, port), where), "pods")
        got.append(chosen_id(node))
    first, other = got[0], got[3]
    assert got == [first, first, first, other, first]
    assert first != other
    assert node.maps["service_stats"].get(1)[0] == 2


@pytest.mark.parametrize("change", ["gone", "moved", "idle"])
def test_datagrams_choose_again(node: PacketNode, places: Places, change: str) -> None:
    """A flow gets a new choice when its backend is removed, when frontends have moved, and when it
    was silent for longer than conntrack keeps it.
    """
    old, new = at(places.there, 1), at(places.there, 2)
    where = serve(node, places, "cluster", "udp", cluster=[old])
    request = datagram(at(places.pod, 50123), where)
    node.ingress(request, "pods")
    serve(node, places, "cluster", "udp", cluster=[new], leaving=[] if change == "gone" else [old])
    if change == "gone":
        node.put("backend_slots", node.backend_id(1, old), 2**32 - 1)
    elif change == "moved":
        node.settings("detect_local", "netfilter", frontend_moves=7)
    else:
        node.settings("detect_local", "netfilter", udp_timeout=0)
        node.forget_recent()
    node.ingress(request, "pods")
    assert chosen_id(node) == node.backend_id(1, new)
    picks_no_band = node.priority & (Chosen.LIFTED | CHOSEN_BAND) == Chosen.LIFTED
    assert picks_no_band is (change != "idle"), "an idle flow is a new one to conntrack"


def in_middle(protocol: str, source: str, destination: str) -> Packet:
    """Return a packet that need not be the first of its flow."""
    found = segment(source, destination, "A") if protocol == "tcp" else None
    return found or datagram(source, destination)


def test_the_id_is_another_services(node: PacketNode, places: Places, protocol: str) -> None:
    """If the id of a flow's backend was given to another service's backend, the flow does not go
    there.
    """
    old, new, stranger = (at(places.there, port) for port in (1, 2, 3))
    where = serve(node, places, "cluster", protocol, cluster=[old])
    request = in_middle(protocol, at(places.pod, 50123), where)
    for _ in range(2):
        node.ingress(request, "pods")
        assert chosen_id(node) == node.backend_id(1, old)
    serve(node, places, "cluster", protocol, cluster=[new])
    node.ids[2, stranger] = node.backend_id(1, old)
    node.publish(2, {}, cluster=[stranger])
    for _ in range(2):
        node.ingress(request, "pods")
        assert chosen_id(node) == node.backend_id(1, new)


def test_datagrams_renew_their_choice(node: PacketNode, places: Places) -> None:
    """An active flow is not idle: its time of last use is noted at least once a second."""
    where = serve(node, places, "cluster", "udp", cluster=[at(places.there, 1)])
    request = datagram(at(places.pod, 50123), where)
    node.ingress(request, "pods")
    ((flow, choice),) = node.maps["udp_choices"].items()
    idle = choice._replace(last_used=choice.last_used - 20 * 10**9)
    node.put("udp_choices", flow, idle)

    def is_renewed() -> bool:
        node.ingress(request, "pods")
        return bool(node.maps["udp_choices"].get(flow).last_used > idle.last_used)

    wait_until("the choice is renewed", is_renewed)
    assert node.maps["service_stats"].get(1)[0] == 1


@pytest.mark.parametrize("remembered", [True, False])
def test_a_removed_frontend(
    node: PacketNode, places: Places, protocol: str, remembered: bool
) -> None:
    """Packets to a removed frontend are left alone, even in a flow that had a choice."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 1)])
    client = at(places.client, 50123)
    if remembered:
        node.ingress(opening(protocol, client, where))
        assert chosen_id(node)
    node.withdraw(written(places, "nodeport", protocol))
    later = datagram(client, where) if protocol == "udp" else segment(client, where, "A")
    assert node.ingress(later) == ("pass", bytes(later), {"passed": 1})
    assert chosen_id(node) == 0


def test_datagrams_after_a_change_to_the_flow_tables(node: PacketNode, places: Places) -> None:
    """A flow in conntrack keeps its choice. A new flow goes to the flow tables."""
    where = serve(node, places, "cluster", "udp", cluster=[at(places.there, 1)])
    request = datagram(at(places.pod, 50123), where)
    node.ingress(request, "pods")
    node.settings("detect_local")
    assert node.ingress(request, "pods") == ("pass", bytes(request), {"established": 1})
    assert chosen_id(node) == node.backend_id(1, at(places.there, 1))
    assert not node.flows("udp")
    node.through(datagram(at(places.pod, 50124), where), "pods")
    assert node.flows("udp")


@pytest.mark.parametrize("words", ["", "round_robin", "by_client", "by_tuple"])
@pytest.mark.parametrize("remembered", [True, False])
def test_segments_in_the_middle(
    node: PacketNode, places: Places, words: str, remembered: bool
) -> None:
    """A later segment gets the backend of its SYN, so its connection survives `conntrack -F`; it
    passes uncounted, and takes no turn. If the choice is forgotten, the tuple's hash gives the same
    backend, except with round-robin.
    """
    backends = [at(places.there, port) for port in (1, 2, 3)]
    where = serve(node, places, "cluster", "tcp", words, cluster=backends)
    ids, turns, kept = [node.backend_id(1, each) for each in backends], list[int](), 0
    for port in CLIENTS:
        node.ingress(segment(at(places.pod, port), where), "pods")
        first = chosen_id(node)
        turns.append(ids.index(first))
        if not remembered:
            node.forget_recent()
        later = segment(at(places.pod, port), where, "A", payload=b"more")
        assert node.ingress(later, "pods") == ("pass", bytes(later), {"passed": 1})
        kept += chosen_id(node) == first
    assert node.maps["service_stats"].get(1)[0] == len(CLIENTS)
    assert kept == len(CLIENTS) or (words == "round_robin" and not remembered and kept > 0)
    if words == "round_robin":
        assert {(after - before) % 3 for before, after in pairwise(turns)} == {1}


def test_segments_whose_backend_has_gone(node: PacketNode, places: Places) -> None:
    """Segments whose backend has gone go to another backend, which resets the connection.

    kube-proxy behaves the same.
    """
    old, new = at(places.there, 1), at(places.there, 2)
    where = serve(node, places, "cluster", "tcp", cluster=[old])
    node.ingress(segment(at(places.pod, 50123), where), "pods")
    serve(node, places, "cluster", "tcp", cluster=[new])
    node.put("backend_slots", node.backend_id(1, old), 2**32 - 1)
    node.ingress(segment(at(places.pod, 50123), where, "A"), "pods")
    assert chosen_id(node) == node.backend_id(1, new)


@pytest.mark.parametrize("case", ["other traffic", "no endpoint", "denied"])
def test_segments_that_get_nothing(node: PacketNode, places: Places, case: str) -> None:
    """In the middle of a connection no segment is refused, dropped or counted.

    conntrack may know the connection from before the Service was changed.
    """
    where = at(places.here, 80)
    if case == "no endpoint":
        where = serve(node, places, "cluster", "tcp")
    elif case == "denied":
        where = serve(node, places, "balancer", "tcp", "restricted", cluster=[at(places.there, 1)])
    later = segment(at(places.client, 50123), where, "A")
    for _ in range(2):
        assert node.ingress(later) == ("pass", bytes(later), {"passed": 1})
        assert chosen_id(node) == 0
    assert not any(node.maps["service_stats"].get(1))


@pytest.mark.parametrize("kept", ["scheduler", "sctp"])
def test_left_to_the_flow_tables(node: PacketNode, places: Places, kept: str) -> None:
    """Services with least-connections are left to the flow tables, and so is SCTP if the kernel's
    NAT lacks it.
    """
    protocol, words = ("tcp", "least_connections") if kept == "scheduler" else ("sctp", "")
    where = serve(node, places, "cluster", protocol, words, cluster=[at(places.there, 1)])
    client = at(places.pod, 50123)
    request = node.through(opening(protocol, client, where), "pods")
    assert node.priority == 0
    assert ends(request) == f"{client} > {at(places.there, 1)}"
    assert ends(node.through(reply(request), "uplink", "pods")) == f"{where} > {client}"


def test_an_init_gets_a_backend(node: PacketNode, places: Places) -> None:
    """An INIT gets a backend if the kernel's NAT can translate SCTP."""
    node.settings("detect_local", "netfilter", "netfilter_sctp")
    where = serve(node, places, "cluster", "sctp", cluster=[at(places.there, 1)])
    node.ingress(opening("sctp", at(places.pod, 50123), where), "pods")
    assert chosen_id(node) == node.backend_id(1, at(places.there, 1))


def test_flows_from_before(node: PacketNode, places: Places, protocol: str) -> None:
    """A flow in the flow tables stays there when the engine changes."""
    node.settings("detect_local")
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 1)])
    client = at(places.pod, 50123)
    request = node.through(opening(protocol, client, where), "pods")
    node.settings("detect_local", "netfilter")
    later = datagram(client, where) if protocol == "udp" else segment(client, where, "A")
    assert ends(node.through(later, "pods")) == ends(request)
    assert ends(node.through(reply(request), "uplink", "pods")) == f"{where} > {client}"


def test_with_shadow_no_backend_is_chosen(node: PacketNode, places: Places, protocol: str) -> None:
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 1)])
    node.settings("detect_local", "netfilter", "shadow")
    for _ in range(2):
        request = opening(protocol, at(places.pod, 50123), where)
        assert node.ingress(request, "pods").verdicts == {"translated": 1}
        assert node.priority == 0


def test_a_backend_is_chosen_while_programs_are_attached(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """While a device may lack the program at egress netfilter also translates for the Services of
    the flow tables, as conntrack translates the replies.
    """
    backend = at(places.there, 1)
    where = serve(node, places, "cluster", protocol, cluster=[backend])
    counted = serve(
        node, places, "nodeport", protocol, "least_connections", service=2, cluster=[backend]
    )
    node.settings("detect_local", "netfilter", "attaching")
    node.ingress(opening(protocol, at(places.pod, 50123), where), "pods")
    assert chosen_id(node) == node.backend_id(1, backend)
    node.ingress(opening(protocol, at(places.client, 50124), counted))
    assert chosen_id(node) == node.backend_id(2, backend)
    assert not node.flows(protocol)
    node.settings("detect_local", "netfilter")
    assert node.ingress(opening(protocol, at(places.client, 50125), counted)).verdicts.keys() <= {
        *("translated", "masqueraded")
    }
    assert chosen_id(node) == 0
    assert node.flows(protocol)
