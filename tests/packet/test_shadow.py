# SPDX-License-Identifier: Apache-2.0
"""Programs that open no flows. With --shadow new requests pass unchanged, and their verdicts are
counted. Requests also pass until all devices have programs: the reply to a masqueraded request may
come in at a device without one.
"""

import pytest

from tests.packet.frames import at, ends, opening, reply
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


def test_new_requests(node: PacketNode, places: Places, protocol: str) -> None:
    """Requests that would be translated, refused or dropped are counted; no flow is opened."""
    served = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    refused = serve(node, places, "cluster", protocol, service=2)
    node.settings("detect_local", "shadow")
    unallocated = at(places.unallocated, 80)
    verdicts = {served: "translated", refused: "refused", unallocated: "unallocated"}
    for where, verdict in verdicts.items():
        request = opening(protocol, at(places.client, 50123), where)
        assert node.ingress(request) == ("pass", bytes(request), {verdict: 1})
    assert not node.flows(protocol)


def test_requests_of_the_node(node: PacketNode, places: Places, protocol: str) -> None:
    """The node's own packets pass even if they would be refused or dropped at their device."""
    refused = serve(node, places, "cluster", protocol, service=2)
    node.settings("detect_local", "shadow")
    for where, verdict in {refused: "refused", at(places.unallocated, 80): "unallocated"}.items():
        request = opening(protocol, at(places.node, 50123), where)
        assert node.egress(request, into=None) == ("pass", bytes(request), {verdict: 1})


@pytest.mark.parametrize("setting", ["shadow", "attaching"])
def test_known_flows(node: PacketNode, places: Places, protocol: str, setting: str) -> None:
    """Existing connections continue, in both directions."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    client = at(places.client, 50123)
    request = node.through(opening(protocol, client, where))
    node.settings("detect_local", setting)
    assert ends(node.through(reply(request))) == f"{where} > {client}"
    assert ends(node.through(opening(protocol, client, where))) == ends(request)


def test_no_new_flow_while_attaching(node: PacketNode, places: Places, protocol: str) -> None:
    """A request passes unchanged, to whatever served it before, even if it would be refused."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    serve(node, places, "cluster", protocol, service=2)
    node.settings("detect_local", "attaching")
    for host in (where, at(places.cluster_ip, 80), at(places.unallocated, 80)):
        request = opening(protocol, at(places.client, 50123), host)
        assert node.ingress(request) == ("pass", bytes(request), {"passed": 1})
    assert not node.flows(protocol)
    node.settings("detect_local")
    request = opening(protocol, at(places.client, 50123), where)
    assert node.ingress(request).verdicts == {"translated": 1}
