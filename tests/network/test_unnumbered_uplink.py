# SPDX-License-Identifier: Apache-2.0
"""A node whose uplink has no address of its own but a link-local one; the node's are on loopback.

So it is with BGP unnumbered. What is masqueraded has the source that the kernel chooses for the
node's own packets; where programs cannot ask it (before 6.7), the Node's address.
"""

import json
import subprocess
from collections.abc import Iterator

import pytest

from ebpflb.datapath import probe
from ebpflb.lab.netns import Namespace
from tests.kit import requests, two_nodes
from tests.kit.two_nodes import ENGINES, Frontends, TwoNodes
from tests.network.test_packets_table import families, protocols
from tests.network.test_route_sources import chosen, masqueraded_by_kernel, seen

FRONTENDS = Frontends(10)


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes]:
    """The near node is such a one; the endpoint is on the far one."""
    two_nodes.require(request.param)
    with two_nodes.prepared(tmp_path_factory.mktemp("two"), request.param, move_addresses) as made:
        yield made


def move_addresses(two: TwoNodes) -> None:
    """From eth0 to loopback, for which only IPv4 answers the neighbours that ask at eth0."""
    near, far = two.near, two.far
    near.ip(
        *(f"address del {near.v4}/24 dev eth0", f"address add {near.v4}/32 dev lo"),
        *(f"address del {near.v6}/64 dev eth0", f"address add {near.v6}/128 dev lo"),
        *("route add 192.0.2.0/24 dev eth0", "route add fd02::/64 dev eth0"),
        f"route add 10.244.2.0/24 via {far.v4}",
        f"route replace fd00:244:2::/64 via {far.v6}",
        *("route add default via 192.0.2.254", "route replace default via fd02::fe dev eth0"),
    )
    for host, device in ((two.lab.router, "nodes"), (far, "eth0")):
        host.ip(f"neigh replace {near.v6} lladdr {mac(near)} dev {device} nud permanent")


def mac(host: Namespace) -> str:
    command = [*host.enter, "ip", "-json", "link", "show", "dev", "eth0"]
    (link,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return str(link["address"])


@families
@protocols
def test_it_masquerades_from_an_address_of_the_node(
    two: TwoNodes, send: requests.Send, v6: bool
) -> None:
    """Clients outside are answered through a NodePort, and the backend sees the kernel's choice."""
    found = {seen(two, v6=v6, send=send) for _ in range(4)}
    own = two.near.v6 if v6 else two.near.v4
    assert found == {chosen(two, v6=v6) if probe.route_source() else own}


@families
def test_the_kernel_masquerades_so(two: TwoNodes, v6: bool) -> None:
    """What the node's own packets have as their source, its masquerading has too."""
    assert masqueraded_by_kernel(two, v6=v6) == chosen(two, v6=v6)
