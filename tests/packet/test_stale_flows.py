# SPDX-License-Identifier: Apache-2.0
"""The flows that survive a change of endpoints (kube-proxy.md 11.1): upstream's 72 entries.

kube-proxy deletes the conntrack entries of stale UDP flows; here the next datagram moves the flow.
Two results differ from kube-proxy's. A flow whose service has no endpoint left is refused, not sent
to a dead address. A flow whose service was deleted passes unchanged.
"""

from typing import Any

import pytest

from tests.packet.frames import at, datagram, destination, ends, next_packet, opening, reply
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import KINDS, serve, written

STATES = ("serving", "leaving", "gone")
PORTS = (8080, 9090)  # as before, or the target port has changed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("port", PORTS)
def test_endpoint_changes(
    node: PacketNode, places: Places, protocol: str, kind: str, state: str, port: int
) -> None:
    """UDP flows stay with an endpoint that still serves at its old port; TCP and SCTP flows always
    stay.
    """
    client, old, other = (
        at(places.client, 50123),
        at(places.there, 8080),
        at(places.elsewhere, 8080),
    )
    where = serve(node, places, kind, protocol, cluster=[old])
    node.through(reply(node.through(opening(protocol, client, where))))
    kept = [at(places.there, port)]
    lists: dict[str, Any] = {
        "serving": {"cluster": [*kept, other]},
        "leaving": {"cluster": [other], "leaving": kept},
        "gone": {"cluster": [other]},
    }
    serve(node, places, kind, protocol, **lists[state])
    came = node.ingress(next_packet(protocol, client, where))
    stale = protocol == "udp" and (state == "gone" or port != 8080)
    if not stale:
        assert (came.verdicts, destination(came.packet)) == ({"established": 1}, old)
    else:
        assert came.verdicts == {"translated": 1}
        assert destination(came.packet) in {*lists[state]["cluster"]}
    left = node.egress(came.packet)
    answer = node.ingress(reply(left.packet, "A"))
    assert ends(node.egress(answer.packet).packet) == f"{where} > {client}"


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_left(node: PacketNode, places: Places, kind: str) -> None:
    """A flow is refused if its service has no endpoint left; kube-proxy sends it to the dead
    one.
    """
    where = serve(node, places, kind, "udp", cluster=[at(places.there, 5353)])
    request = datagram(at(places.client, 50123), where)
    node.through(request)
    serve(node, places, kind, "udp")
    assert node.ingress(request).verdicts == {"refused": 1}


@pytest.mark.parametrize("kind", ["nodeport", "balancer", "external"])
def test_deleted_service(node: PacketNode, places: Places, kind: str) -> None:
    """The datagrams of a deleted service pass unchanged; a connection continues."""
    for protocol, verdict in (("udp", "passed"), ("tcp", "established"), ("sctp", "established")):
        client = at(places.client, 50123)
        where = serve(node, places, kind, protocol, cluster=[at(places.there, 5353)])
        node.through(reply(node.through(opening(protocol, client, where))))
        node.withdraw(written(places, kind, protocol))
        node.publish(1, [])
        came = node.ingress(next_packet(protocol, client, where))
        assert came.verdicts == {verdict: 1}
