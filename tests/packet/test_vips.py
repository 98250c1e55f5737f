# SPDX-License-Identifier: Apache-2.0
"""Addresses of services that behave like addresses of a host (docs/vips.md): pings, unknown
ports.
"""

from ipaddress import ip_address

import pytest
from scapy.layers.inet6 import ICMPv6EchoRequest

from ebpflb.kernel.maps.bpf_map import Counters
from tests.packet.budgets import allow
from tests.packet.frames import ICMP, Packet, Raw, at, built, carrier, network, opening, segment
from tests.packet.network import routed_from
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.vips import DROP, PASS, REJECT, publish

BALANCED = ("cluster", "balancer", "external")


def ping(source: str, host: str, size: int = 56) -> Packet:
    data = bytes(range(256)) * 6
    if ":" in host:
        request = ICMPv6EchoRequest(id=7, seq=9, data=data[:size])
        return built(carrier(source, host, hlim=9) / request)
    return built(carrier(source, host, ttl=9) / ICMP(id=7, seq=9) / Raw(data[:size]))


@pytest.mark.parametrize("kind", BALANCED)
@pytest.mark.parametrize("size", [0, 1, 56, 1400])
@pytest.mark.parametrize("sender", ["client", "pod"])
def test_a_ping_is_answered(
    node: PacketNode, places: Places, kind: str, size: int, sender: str
) -> None:
    """The answer has the same data and correct checksums, and leaves by the same device."""
    node.settings("detect_local", "answer_pings")
    address = publish(node, places, kind)
    source: str = getattr(places, sender)
    request = ping(source, address, size)
    came = node.ingress(request, "pods" if sender == "pod" else "uplink")
    assert (came.action, came.verdicts) == ("redirect", {"ping_answered": 1})
    answer = came.packet
    assert (answer.src, answer.dst) == (request.dst, request.src)
    assert (network(answer).src, network(answer).dst) == (address, source)
    assert (answer.ttl if "IP" in answer else answer.hlim) == 64
    was, now = bytes(network(request).payload), bytes(network(answer).payload)
    assert (now[0], now[1], now[4:]) == (0 if places.version == 4 else 129, 0, was[4:])
    assert bytes(built(answer.copy())) == came.frame  # with all sums computed again
    left = node.egress(came.packet)
    assert (left.action, left.verdicts) == ("pass", {"passed": 1})


@pytest.mark.parametrize("kind", BALANCED)
def test_pings_are_off_by_default(node: PacketNode, places: Places, kind: str) -> None:
    """Pings to a cluster IP are refused, as in mode nftables; pings to other addresses are
    routed.
    """
    address = publish(node, places, kind)
    came = node.ingress(ping(places.client, address))
    assert came.verdicts == ({"refused": 1} if kind == "cluster" else {"passed": 1})


@pytest.mark.parametrize(
    ("kind", "words", "verdict"),
    [
        ("cluster", "", "refused"),
        ("external", "", "passed"),
        ("balancer", "", "passed"),
        ("balancer", "local", "passed"),
        ("balancer", "local passthrough", "passed_through"),
    ],
)
def test_without_an_endpoint_a_ping_gets_no_answer(
    node: PacketNode, places: Places, kind: str, words: str, verdict: str
) -> None:
    """A ping gets no answer without an endpoint; under policy Local, other nodes' endpoints do not
    count for a client outside.
    """
    node.settings("detect_local", "answer_pings")
    address = publish(node, places, kind, words, served=words != "")
    assert node.ingress(ping(places.client, address)).verdicts == {verdict: 1}


def test_local_clients_are_answered_by_endpoints_elsewhere(
    node: PacketNode, places: Places
) -> None:
    """Local clients are answered, because they would be served at that address, too."""
    node.settings("detect_local", "answer_pings")
    address = publish(node, places, "balancer", "local")
    assert node.ingress(ping(places.pod, address), "pods").verdicts == {"ping_answered": 1}


def test_source_ranges_hold_for_pings(node: PacketNode, places: Places) -> None:
    node.settings("answer_pings")
    address = publish(node, places, "balancer", "restricted")
    came = node.ingress(ping(places.client, address))
    assert (came.action, came.verdicts) == ("drop", {"source_denied": 1})
    node.admit(1, places.clients)
    assert node.ingress(ping(places.client, address)).verdicts == {"ping_answered": 1}


def test_the_nodes_own_addresses_are_left_to_its_kernel(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """Packets to a load balancer's address that is assigned to the node are left to its kernel."""
    node.settings("answer_pings", *REJECT.split())
    address = publish(node, places, "balancer")
    node.has(address)
    for request in (
        ping(places.client, address),
        opening(protocol, at(places.client, 50123), at(address, 81)),
    ):
        assert node.ingress(request) == ("pass", bytes(request), {"passed": 1})


def test_pings_have_a_limit_of_their_own(node: PacketNode, places: Places, protocol: str) -> None:
    """A flood of pings affects neither refusals nor nearly all other clients; refusals do not
    affect pings.
    """
    node.settings("answer_pings", *REJECT.split())
    address = publish(node, places, "balancer")
    request = ping(places.client, address)
    every = range(1, node.maps["reject_budgets"].spec.entries)
    allow(node, 2, *every)
    assert [node.ingress(request).action for _ in range(2)] == ["redirect"] * 2
    limited = node.ingress(request)
    assert (limited.action, limited.verdicts["reject_limited"]) == ("drop", 1)
    others = [str(ip_address(places.client) + each) for each in range(1, 21)]
    answers = [node.ingress(ping(other, address)).action for other in others]
    assert answers.count("redirect") > 15
    refused = node.ingress(opening(protocol, at(places.client, 50123), at(address, 81)))
    assert (refused.action, refused.verdicts) == ("redirect", {"refused": 1})
    budgets = node.maps["reject_budgets"]
    assert isinstance(budgets, Counters)
    budgets.zero(every)
    allow(node, 0, 0)
    assert node.ingress(request).action == "redirect"


UNKNOWN = [  # setting, kind: the verdict of a client outside
    ("", "balancer", "passed"),
    ("answer_pings", "balancer", "passed"),
    (PASS, "balancer", "unknown_port"),  # the default route leads back to the router
    (REJECT, "balancer", "refused"),
    (DROP, "balancer", "unknown_port"),
    *((setting, "external", "passed") for setting in (PASS, REJECT, DROP)),
    *((setting, "cluster", "refused") for setting in ("", PASS, REJECT, DROP)),
]
ACTIONS = {"passed": "pass", "refused": "redirect", "unknown_port": "drop"}


@pytest.mark.parametrize(("setting", "kind", "verdict"), UNKNOWN)
@pytest.mark.parametrize("served", [True, False])
def test_unknown_ports(
    node: PacketNode,
    places: Places,
    protocol: str,
    setting: str,
    kind: str,
    verdict: str,
    served: bool,
) -> None:
    """The setting applies with or without endpoints; unknown ports of cluster IPs are always
    refused (6.3).
    """
    node.settings("detect_local", *setting.split())
    address = publish(node, places, kind, served=served)
    came = node.ingress(opening(protocol, at(places.client, 50123), at(address, 81)))
    assert (came.action, came.verdicts) == (ACTIONS[verdict], {verdict: 1})
    if setting != "answer_pings":
        came = node.ingress(ping(places.client, address))
        assert (came.action, came.verdicts) == (ACTIONS[verdict], {verdict: 1})


@pytest.mark.parametrize(("setting", "verdict"), [(REJECT, "refused"), (DROP, "unknown_port")])
def test_unknown_ports_on_netfilter(
    node: PacketNode, places: Places, protocol: str, setting: str, verdict: str
) -> None:
    """Datagrams to unknown ports are not handled by their tuple (path/repeated.h), unlike most
    other datagrams.
    """
    node.settings("detect_local", "netfilter", *setting.split())
    address = publish(node, places, "balancer")
    for _ in range(2):
        came = node.ingress(opening(protocol, at(places.client, 50123), at(address, 81)))
        assert (came.action, came.verdicts) == (ACTIONS[verdict], {verdict: 1})


def test_passed_by_another_device(node: PacketNode, places: Places, protocol: str) -> None:
    """A packet follows its route, unless the route leads back where the packet came from."""
    node.settings("detect_local", *PASS.split())
    address = publish(node, places, "balancer")
    with routed_from(places.client, "tunnel"):
        for request in (
            opening(protocol, at(places.client, 50123), at(address, 81)),
            ping(places.client, address),
        ):
            assert node.ingress(request) == ("pass", bytes(request), {"passed": 1})
            assert node.ingress(request, "tunnel").action == "drop"


@pytest.mark.parametrize("setting", [PASS, REJECT, DROP])
def test_a_pods_packets_may_leave_for_another_node(
    node: PacketNode, places: Places, protocol: str, setting: str
) -> None:
    """A pod's packet may leave for another node that has the address, as with load balancers that
    are the nodes themselves.
    """
    node.settings("detect_local", *setting.split())
    address = publish(node, places, "balancer")
    request = opening(protocol, at(places.pod, 50123), at(address, 22))
    assert node.ingress(request, "pods") == ("pass", bytes(request), {"passed": 1})


@pytest.mark.parametrize("setting", [PASS, REJECT, DROP])
def test_open_connections_go_on(node: PacketNode, places: Places, setting: str) -> None:
    """Connections older than the service continue: the node may be a router for them."""
    node.settings("detect_local", *setting.split())
    address = publish(node, places, "balancer")
    for flags in ("A", "PA", "FA", "R", "SA"):
        request = segment(at(places.client, 50123), at(address, 81), flags)
        assert node.ingress(request) == ("pass", bytes(request), {"passed": 1})


def test_exempt_addresses_are_left_alone(node: PacketNode, places: Places, protocol: str) -> None:
    """Addresses that rules in raw exempt from conntrack are left alone."""
    node.settings("answer_pings", *REJECT.split())
    address = publish(node, places, "balancer", "untracked")
    for request in (
        ping(places.client, address),
        opening(protocol, at(places.client, 50123), at(address, 81)),
    ):
        assert node.ingress(request) == ("pass", bytes(request), {"passed": 1})
