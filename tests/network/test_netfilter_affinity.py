# SPDX-License-Identifier: Apache-2.0
"""Session affinity beside a flood of forged clients, with the engine netfilter."""

from pathlib import Path

import pytest

from ebpflb.model.packet_path import Engine
from tests.kit import flood, requests
from tests.kit.two_nodes import Frontends, TwoNodes

FLOOD = Path(flood.__file__)
FORGED = "172.16.0.1"  # the first of a million
FRONTENDS = Frontends(10)
FORGED_CLIENTS = 20_000  # fewer than the map new_affinity has entries

pytestmark = pytest.mark.parametrize("two", [Engine.NETFILTER], indirect=True)


def forge(two: TwoNodes, to: tuple[str, int], count: int) -> None:
    program = two.outside.python(FLOOD, "many", to[0], str(to[1]), FORGED, str(count))
    assert two.lab.keep(program).wait() == 0


@pytest.mark.extended
def test_affinity_outlives_forged_clients(two: TwoNodes) -> None:
    """A client keeps its endpoint beside many forged ones, as long as they fit into the map."""
    two.lab.router.ip("route add blackhole 172.16.0.0/12")
    two.publish(two.service("web", 10, two.here, two.there, sessionAffinity="ClientIP"))
    to, client = FRONTENDS.to("nodeport", two.near), two.sockets(two.outside)
    kept = requests.tcp(client, *to).name
    forge(two, to, FORGED_CLIENTS)
    assert {requests.tcp(client, *to).name for _ in range(10)} == {kept}


@pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
def test_affinity_of_datagrams(two: TwoNodes, v6: bool) -> None:
    """UDP clients too keep their endpoint, from other ports."""
    two.publish(two.service("web", 10, two.here, two.there, sessionAffinity="ClientIP"))
    to, client = FRONTENDS.to("nodeport", two.near, v6=v6), two.sockets(two.outside)
    assert len({requests.udp(client, *to).name for _ in range(10)}) == 1
