# SPDX-License-Identifier: Apache-2.0
"""Both programs are at every device, so a packet may pass each of them more than once."""

import pytest

from tests.packet.frames import at, destination, ends, forwarded, host_of, opening, reply, source
from tests.packet.network import routed_from
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


@pytest.mark.parametrize("sender", ["pod", "here"])
def test_port_and_bridge(node: PacketNode, places: Places, protocol: str, sender: str) -> None:
    """A packet that the program at a bridge's port has translated is left alone by the program at
    the bridge.
    """
    backend, client = at(places.here, 8080), at(getattr(places, sender), 50123)
    where = serve(node, places, "cluster", protocol, cluster=[backend], here=[backend])
    packet = opening(protocol, client, where)
    for _ in range(2):
        port = node.ingress(packet, "tunnel").packet
        bridge = node.ingress(port, "pods")
        assert bridge == ("pass", bytes(port), {"passed": 1})
        out = node.egress(forwarded(bridge.packet), "pods", "pods").packet
        assert destination(out) == backend
        assert node.egress(out, "tunnel", "pods")[:2] == ("pass", bytes(out))
        assert host_of(source(out)) == (places.bridge if sender == "here" else places.pod)
        back = node.ingress(reply(out), "tunnel").packet
        assert node.ingress(back, "pods")[:2] == ("pass", bytes(back))
        home = node.egress(forwarded(back), "pods", "pods").packet
        assert ends(home) == f"{where} > {client}"
        assert node.egress(home, "tunnel", "pods")[:2] == ("pass", bytes(home))


def test_what_a_port_let_in_is_not_refused_at_its_bridge(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """A packet for no frontend of a cluster IP, or for no Service, is one that netfilter translated
    after the port: a reply to a socket of the node that IPVS serves. It is refused if it may have
    come by a port without program.
    """
    serve(node, places, "cluster", protocol, cluster=[at(places.here, 8080)])
    for own in (places.cluster_ip, places.unallocated):
        answer = opening(protocol, at(places.here, 8080), at(own, 50123))
        assert node.ingress(answer, "tunnel").action != "pass"
        node.device("pods", places.bridge, places.bridge, "master")
        assert node.ingress(answer, "pods").action != "pass"
        node.device("pods", places.bridge, places.bridge, "master", "all_ports")
        assert node.ingress(answer, "pods") == ("pass", bytes(answer), {"passed": 1})


def test_way_moves(node: PacketNode, places: Places, protocol: str) -> None:
    """A masqueraded flow keeps its source address when its route changes to another device."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    request = opening(protocol, at(places.client, 50123), where)
    once = node.through(request, "uplink", "uplink")
    assert ends(node.through(request, "uplink", "pods")) == ends(once)
    assert (
        ends(node.through(reply(once), "pods", "tunnel")) == f"{where} > {at(places.client, 50123)}"
    )


def test_a_client_with_another_way_back_is_masqueraded(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """A client whose replies would take another route is masqueraded, even to a local backend."""
    backend = at(places.here, 8080)
    where = serve(node, places, "nodeport", protocol, cluster=[backend], here=[backend])
    request = opening(protocol, at(places.other_client, 50123), where)
    assert host_of(source(node.through(request, "tunnel", "pods"))) == places.other_client
    request = opening(protocol, at(places.other_client, 50124), where)
    assert host_of(source(node.through(request, "uplink", "pods"))) == places.bridge


def test_answers_routed_by_source(node: PacketNode, places: Places, protocol: str) -> None:
    """The route of the replies is looked up for the backend's own address, as the stack will do."""
    backend = at(places.here, 8080)
    where = serve(node, places, "nodeport", protocol, cluster=[backend], here=[backend])
    with routed_from(places.here, "tunnel"):
        request = opening(protocol, at(places.client, 50123), where)
        assert host_of(source(node.through(request, "uplink", "pods"))) == places.bridge
        request = opening(protocol, at(places.client, 50124), where)
        assert host_of(source(node.through(request, "tunnel", "pods"))) == places.client


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "0.0.0.0", "::1", "::"])
def test_loopback_matches_no_nodeport(node: PacketNode, protocol: str, host: str) -> None:
    """A packet to loopback or to the unspecified address matches no NodePort."""
    for number, any_ in enumerate(("0.0.0.0", "::"), 1):
        words = {f"{at(any_, 30080)}/{protocol}": "external"}
        node.publish(number, words, cluster=[at("10.244.1.20" if number == 1 else "fd00::1", 80)])
    client = at("198.51.100.7" if "." in host else "2001:db8:c::7", 50123)
    request = opening(protocol, client, at(host, 30080))
    assert node.ingress(request) == ("pass", bytes(request), {"passed": 1})
    own = at("192.0.2.1" if "." in host else "2001:db8:1::1", 30080)
    assert node.ingress(opening(protocol, client, own)).verdicts == {"translated": 1}
