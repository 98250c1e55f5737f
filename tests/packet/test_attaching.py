# SPDX-License-Identifier: Apache-2.0
"""Until the first programs are at every device, packets open no flows.

The reply to a masqueraded request may come in at a device that has no program yet.
"""

from tests.packet.frames import at, ends, opening, reply
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


def test_no_new_flow(node: PacketNode, places: Places, protocol: str) -> None:
    """A request goes on to whoever served it before, untouched, and so does one to be refused."""
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


def test_known_flow(node: PacketNode, places: Places, protocol: str) -> None:
    """Flows that are known go on: an earlier agent's, after a crash during its first start."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    client = at(places.client, 50123)
    request = node.through(opening(protocol, client, where))
    node.settings("detect_local", "attaching")
    assert ends(node.through(reply(request))) == f"{where} > {client}"
    again = node.through(opening(protocol, client, where))
    assert ends(again) == ends(request)
