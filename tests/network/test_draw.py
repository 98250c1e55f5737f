# SPDX-License-Identifier: Apache-2.0
"""No client can choose its endpoint by its source port: each node draws by its own secret."""

from collections.abc import Iterator

import pytest

from tests.kit import requests
from tests.kit.parameters import both_engines
from tests.kit.two_nodes import Frontends, TwoNodes, address

pytestmark = both_engines

PORTS = range(20_000, 20_064)
NETWORKS = {False: "203.0.113.0/24", True: "fd03:113::/64"}


@pytest.fixture(params=[False, True], ids=["v4", "v6"])
def v6(two: TwoNodes, request: pytest.FixtureRequest) -> Iterator[bool]:
    """The family. The router leads the service's external address to one of the nodes."""
    two.publish(two.service("web", 10, two.here, two.there))
    yield request.param
    network = NETWORKS[request.param]
    two.lab.router.lead(network, address(two.near, network))


def drawn(two: TwoNodes, node_name: str, v6: bool) -> list[str]:
    """The endpoint that each source port of a client gets at this node; no earlier flow counts."""
    two.delete_flows("other_flows")
    network, where = NETWORKS[v6], Frontends(10).to("external", two.near, v6=v6)
    two.lab.router.lead(network, address(getattr(two, node_name), network))
    names = []
    for port in PORTS:
        with requests.udp_socket(two.sockets(two.outside), where[0]) as client:
            client.bind((two.outside.v6 if v6 else two.outside.v4, port))
            names.append(requests.exchange(client, *where).name)
    return names


@pytest.mark.extended
def test_two_nodes_draw_independently_for_the_same_ports(two: TwoNodes, v6: bool) -> None:
    """What a client learns at one node says nothing of another; at one node it stays the same."""
    near, far = drawn(two, "near", v6), drawn(two, "far", v6)
    agreeing = sum(a == b for a, b in zip(near, far, strict=True))
    assert 8 < agreeing < 56  # 32 of 64 by chance; less or more once in 10^9 times
    assert set(near) == set(far) == {"here", "there"}
    assert drawn(two, "near", v6) == near
