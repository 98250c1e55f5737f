# SPDX-License-Identifier: Apache-2.0
"""Which backend the next flow gets, where the service's scheduler is not random."""

import pytest

from tests.packet.frames import at, destination, opening
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve

BACKENDS = 5


@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_round_robin_is_an_exact_rotation(node: PacketNode, places: Places, protocol: str) -> None:
    """Of flows; further packets of a flow take no turn."""
    backends = [at(places.there, 8000 + number) for number in range(BACKENDS)]
    where = serve(node, places, "nodeport", protocol, "round_robin", cluster=backends)
    clients = [at(places.client, 50_000 + number) for number in range(2 * BACKENDS)]
    met = []
    for client in clients:
        packet = opening(protocol, client, where)
        met.append(destination(node.ingress(packet).packet))
        assert destination(node.ingress(packet).packet) == met[-1]
    assert sorted(met[:BACKENDS]) == backends
    assert met[BACKENDS:] == met[:BACKENDS]
