# SPDX-License-Identifier: Apache-2.0
"""Services on ranges of ports: the backend gets the port that the client asked for."""

from contextlib import closing

import pytest

from ebpflb.kernel.maps.ring import Ring
from ebpflb.model.annotations import PortRange
from ebpflb.plan.entries import Chosen, Frontend, ranges_entry
from tests.packet.frames import at, datagram, ends, opening
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import KINDS, exchange
from tests.publishing import frontend

FIRST, LAST = 10_000, 10_009
PORTS = (FIRST, FIRST + 5, LAST)
OTHERS = (FIRST - 1, LAST + 1)


@pytest.fixture(params=["tcp", "udp", "sctp"])
def protocol(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def serve_range(
    node: PacketNode, address: str, protocol: str, *backends: str, kind: str = "external"
) -> None:
    """Let service 1 answer on the range at this address, beside another range that is far away."""
    plain = f"{at(address, FIRST)}/{protocol}"
    node.publish(1, {plain: KINDS[kind]}, cluster=[at(each, 0) for each in backends])
    where: Frontend = frontend(plain)
    entry = node.maps["services"].get(where)
    node.withdraw(plain)
    lists = {where.ranges: [PortRange(1, 2), PortRange(FIRST, LAST)]}
    node.put("services", where.ranges._replace(port=FIRST), entry)
    node.put("services", where.ranges, ranges_entry(lists[where.ranges]))


@pytest.mark.parametrize("kind", ["balancer", "external"])
def test_flow_tables(node: PacketNode, places: Places, protocol: str, kind: str) -> None:
    """Each port is translated to the same port, and back; those beside the range are not."""
    address: str = getattr(places, kind)
    serve_range(node, address, protocol, places.there, kind=kind)
    for port in PORTS:
        client = at(places.client, 40_000 + port)
        request = exchange(node, protocol, client, at(address, port))
        assert ends(request).endswith(f"> {at(places.there, port)}")
    for port in OTHERS:
        request = opening(protocol, at(places.client, 50123), at(address, port))
        assert node.ingress(request) == ("pass", bytes(request), {"passed": 1})


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_netfilter(node: PacketNode, places: Places, protocol: str) -> None:
    """The choice says that the port is kept, for every datagram of a flow."""
    node.settings("detect_local", "netfilter")
    serve_range(node, places.external, protocol, places.there)
    wanted = Chosen.PREFIX | Chosen.KEEP_PORT | node.backend_id(1, at(places.there, 0))
    for port in PORTS:
        request = opening(protocol, at(places.client, 50123), at(places.external, port))
        for _ in range(2):
            node.ingress(request)
            assert node.priority & ~Chosen.MASQUERADE == wanted


def test_a_frontend_comes_first(node: PacketNode, places: Places, protocol: str) -> None:
    """With the very port, or as a NodePort where the address is the node's."""
    for address, other in (
        (places.external, at(places.external, FIRST + 5)),
        (places.node, at(places.any, FIRST + 5)),
    ):
        serve_range(node, address, protocol, places.there)
        node.publish(2, {f"{other}/{protocol}": "external"}, cluster=[at(places.elsewhere, 7)])
        for port, backend in (
            (FIRST + 5, at(places.elsewhere, 7)),
            (FIRST, at(places.there, FIRST)),
        ):
            request = exchange(node, protocol, at(places.client, 41_000 + port), at(address, port))
            assert ends(request).endswith(f"> {backend}")


def test_without_a_backend(node: PacketNode, places: Places, protocol: str) -> None:
    """Requests are refused, from outside and from the node itself."""
    serve_range(node, places.external, protocol)
    where, refused = at(places.external, LAST), {"refused": 1}
    assert node.ingress(opening(protocol, at(places.client, 50123), where)).verdicts == refused
    own = opening(protocol, at(places.node, 50123), where)
    assert node.egress(own, into=None).verdicts == refused
    beyond = opening(protocol, at(places.node, 50123), at(places.external, LAST + 1))
    assert node.egress(beyond, into=None).verdicts == {"passed": 1}


def test_ports_in_a_range_are_known(node: PacketNode, places: Places, protocol: str) -> None:
    """Other ports of a load balancer's address are refused, if the operator asks for it."""
    node.settings("unknown_ports", "unknown_reject")
    serve_range(node, places.balancer, protocol, places.there, kind="balancer")
    whole = f"{at(places.balancer, 0)}/icmp"
    node.put("services", frontend(whole), node.maps["services"].get(_range_key(places, protocol)))
    client = at(places.client, 50123)
    known = node.ingress(opening(protocol, client, at(places.balancer, LAST)))
    assert "refused" not in known.verdicts
    unknown = node.ingress(opening(protocol, client, at(places.balancer, LAST + 1)))
    assert unknown.verdicts == {"refused": 1}


def _range_key(places: Places, protocol: str) -> Frontend:
    where: Frontend = frontend(f"{at(places.balancer, FIRST)}/{protocol}")
    return where.ranges._replace(port=FIRST)


def test_datagrams_to_a_removed_endpoint_are_reported(node: PacketNode, places: Places) -> None:
    """Whatever their port."""
    node.settings("detect_local", "netfilter")
    node.put("flow_gate", 0, (0, 0, 1, 1, 0))
    node.put("stale_endpoints", frontend(f"{at(places.there, 0)}/udp"), 2)
    with closing(Ring(node.maps["moved_flows"])) as ring:
        ring.take_values()
        for host, port in ((places.there, LAST), (places.elsewhere, LAST)):
            node.egress(datagram(at(places.client, 50123), at(host, port)))
        found = [str(each.destination) for each in ring.take_values()]
    assert found == [places.there]
