# SPDX-License-Identifier: Apache-2.0
"""Masqueraded requests have the source that the kernel's route to the backend would choose.

A node's uplink may have only a link-local address, as with BGP unnumbered; then the node's
addresses are on loopback, and programs that cannot ask the kernel use the Node's address.

Most uplinks here have two addresses in each family. The kernel's choice is shown by a socket of the
node itself, and, if no route names a source (``src``), also by the kernel's own masquerading, which
ignores ``src``. On kernels that programs cannot ask (before 6.7) they use the device's first
address.
"""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.kernel import probe
from ebpflb.lab.agents import wait_until
from ebpflb.lab.netns import Namespace
from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import families, protocols
from tests.kit.two_nodes import CLUSTER_CIDR, ENGINES, Frontends, TwoNodes

FRONTENDS = Frontends(10)
# The kernel lists the newest address of a scope first for IPv6: the global one precedes the ULA.
SECOND = "192.0.2.101", "2001:db8:2::1"
MASQUERADE = """
table inet likekernel {
    chain postrouting {
        type nat hook postrouting priority srcnat;
        ip daddr 10.244.2.0/24 iifname "eth0" masquerade
        ip6 daddr fd00:244:2::/64 iifname "eth0" masquerade
    }
}
"""


def add_addresses(two: TwoNodes) -> None:
    """Add a second address of each family."""
    for address, length in zip(SECOND, (24, 64), strict=True):
        two.near.ip(f"address add {address}/{length} dev eth0")
        two.far.ip(f"route add {address} dev eth0")


def move_addresses(two: TwoNodes) -> None:
    """Move the addresses from eth0 to loopback. Neighbours that ask for them at eth0 get an answer
    only with IPv4.
    """
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


PREPARED = {"second address": add_addresses, "unnumbered uplink": move_addresses}


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes]:
    """Yield nodes with an engine, the near one changed; the endpoint is on the far one."""
    engine, name = request.param
    how: Any = {"engine": engine, "prepare": PREPARED[name], "far_agent": False}
    with two_nodes.running(tmp_path_factory.mktemp("two"), *CLUSTER_CIDR, **how) as made:
        two_nodes.web_on_far(made)
        yield made


def nodes(name: str) -> pytest.MarkDecorator:
    """Return a fixture of nodes that were prepared by this function, with each engine."""
    each = [pytest.param((engine, name), id=str(engine)) for engine in ENGINES]
    return pytest.mark.parametrize("two", each, indirect=True)


second_address, unnumbered = map(nodes, PREPARED)


def seen(two: TwoNodes, *, v6: bool, send: requests.Send = requests.tcp) -> str:
    """Return the source of a request through a NodePort, as the backend sees it."""
    return send(two.sockets(two.outside), *FRONTENDS.to("nodeport", two.near, v6=v6)).source


def chosen(two: TwoNodes, *, v6: bool) -> str:
    """Return the kernel's source for a socket of the node that connects to the backend itself."""
    backend = two.there.v6 if v6 else two.there.v4
    return requests.udp(two.sockets(two.near), backend, TARGET).source


def masqueraded_by_kernel(two: TwoNodes, *, v6: bool) -> str:
    """Return the source of a request to the backend itself, which a netfilter rule masquerades."""
    backend = two.there.v6 if v6 else two.there.v4
    two.lab.router.lead(f"{backend}/{128 if v6 else 32}", two.near.v6 if v6 else two.near.v4)
    two.near.nft(MASQUERADE)
    try:
        return requests.tcp(two.sockets(two.outside), backend, TARGET).source
    finally:
        two.near.nft("delete table inet likekernel")


@second_address
@families
def test_source_follows_the_routes(two: TwoNodes, v6: bool) -> None:
    """A route's new ``src`` applies to flows that begin after it was set; with netfilter the
    kernel's masquerading decides, which ignores ``src``.
    """
    network = "fd00:244:2::/64" if v6 else "10.244.2.0/24"
    gateway = two.far.v6 if v6 else two.far.v4
    first = two.near.v6 if v6 else two.near.v4
    two.near.ip(f"route replace {network} via {gateway} src {SECOND[v6]}")
    try:
        assert chosen(two, v6=v6) == SECOND[v6]
        if two.engine is Engine.NETFILTER:
            source = masqueraded_by_kernel(two, v6=v6)
        else:
            source = SECOND[v6] if probe.route_source() else first
        wait_until("the source", lambda: seen(two, v6=v6) == source)
    finally:
        two.near.ip(f"route replace {network} via {gateway}")
    wait_until("the old source", lambda: seen(two, v6=v6) == first)


@unnumbered
@families
@protocols
def test_an_unnumbered_uplink_masquerades_from_an_address_of_the_node(
    two: TwoNodes, send: requests.Send, v6: bool
) -> None:
    """Clients outside are answered through a NodePort, and the backend sees the kernel's choice."""
    found = {seen(two, v6=v6, send=send) for _ in range(4)}
    own = two.near.v6 if v6 else two.near.v4
    assert found == {chosen(two, v6=v6) if probe.route_source() else own}
