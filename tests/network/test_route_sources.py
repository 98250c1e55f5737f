# SPDX-License-Identifier: Apache-2.0
"""Masqueraded requests have the source that the kernel's route to the backend would choose.

A node's uplink may have no address of its own but a link-local one, as with BGP unnumbered: then
the node's are on loopback; where programs cannot ask the kernel they take the Node's address.

Most uplinks here have two addresses in each family. The kernel's choice is shown by a socket of the
node itself, and where no route names a source (``src``) by the kernel's own masquerading too, which
does not regard ``src``. On kernels that programs cannot ask (before 6.7) the agent tells them.
"""

import json
import subprocess
from collections.abc import Iterator

import pytest

from ebpflb.kernel import probe
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.netns import Namespace
from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import PORT, TARGET
from tests.kit.parameters import families, protocols
from tests.kit.two_nodes import CLUSTER_CIDR, ENGINES, Frontends, TwoNodes

FRONTENDS, PUBLIC = Frontends(10), Frontends(11)
# The kernel lists the newest address of a scope first for IPv6: the global one precedes the ULA.
SECOND = "192.0.2.101", "2001:db8:2::1"
# Of two global ones RFC 6724 prefers that which has more bits in common with the destination.
THIRD, GLOBAL = "2001:db8:3:1::1", "2001:db8:3:2::9"
NEIGHBOUR = "10.244.2.250"
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
    """A second one of each family."""
    for address, length in zip(SECOND, (24, 64), strict=True):
        two.near.ip(f"address add {address}/{length} dev eth0")
        two.far.ip(f"route add {address} dev eth0")


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


PREPARED = {"second address": add_addresses, "unnumbered uplink": move_addresses}


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes]:
    """Nodes with an engine, of which the near one was changed; the endpoint is on the far one."""
    engine, name = request.param
    folder, prepare = tmp_path_factory.mktemp("two"), PREPARED[name]
    with two_nodes.running(folder, *CLUSTER_CIDR, engine=engine, prepare=prepare) as made:
        two_nodes.web_on_far(made)
        yield made


def nodes(name: str) -> pytest.MarkDecorator:
    """Nodes that were prepared so, with each engine."""
    each = [pytest.param((engine, name), id=str(engine)) for engine in ENGINES]
    return pytest.mark.parametrize("two", each, indirect=True)


second_address, unnumbered = map(nodes, PREPARED)


def seen(two: TwoNodes, *, v6: bool, send: requests.Send = requests.tcp) -> str:
    """The source of a request through a NodePort, as the backend sees it."""
    return send(two.sockets(two.outside), *FRONTENDS.to("nodeport", two.near, v6=v6)).source


def chosen(two: TwoNodes, *, v6: bool) -> str:
    """What the kernel chooses for a socket of the node that asks the backend itself."""
    backend = two.there.v6 if v6 else two.there.v4
    return requests.udp(two.sockets(two.near), backend, TARGET).source


def masqueraded_by_kernel(two: TwoNodes, *, v6: bool) -> str:
    """The source of a request to the backend itself, which a rule of netfilter masquerades."""
    backend = two.there.v6 if v6 else two.there.v4
    two.lab.router.lead(f"{backend}/{128 if v6 else 32}", two.near.v6 if v6 else two.near.v4)
    two.near.nft(MASQUERADE)
    try:
        return requests.tcp(two.sockets(two.outside), backend, TARGET).source
    finally:
        two.near.nft("delete table inet likekernel")


@pytest.mark.extended
@second_address
@families
def test_source_is_the_kernels_choice(two: TwoNodes, v6: bool) -> None:
    """An added global address masquerades no traffic to unique local ones (RFC 6724)."""
    sends: list[requests.Send] = [requests.tcp, requests.udp]
    for send in sends:
        assert seen(two, v6=v6, send=send) == chosen(two, v6=v6)
    assert chosen(two, v6=v6) == (two.near.v6 if v6 else two.near.v4)
    assert masqueraded_by_kernel(two, v6=v6) == chosen(two, v6=v6)


@second_address
@families
def test_source_follows_the_routes(two: TwoNodes, v6: bool) -> None:
    """A route that gets a ``src`` counts for flows that begin after it was added; with netfilter
    the kernel's masquerading decides, which does not regard it.
    """
    network = "fd00:244:2::/64" if v6 else "10.244.2.0/24"
    gateway = two.far.v6 if v6 else two.far.v4
    two.near.ip(f"route replace {network} via {gateway} src {SECOND[v6]}")
    try:
        assert chosen(two, v6=v6) == SECOND[v6]
        regarded = two.engine is Engine.FLOWS
        source = SECOND[v6] if regarded else masqueraded_by_kernel(two, v6=v6)
        wait_until("the source", lambda: seen(two, v6=v6) == source)
    finally:
        two.near.ip(f"route replace {network} via {gateway}")
    first = two.near.v6 if v6 else two.near.v4
    wait_until("the old source", lambda: seen(two, v6=v6) == first)


@pytest.fixture
def on_link(two: TwoNodes) -> Iterator[None]:
    """near's uplink has an address in the network of far's pods, and their route no source."""
    pod = two.there.v4
    for device in ("eth0", "cni0"):
        two.far.sysctl(f"net.ipv4.conf.{device}.proxy_arp", 1)
    two.far.ip(f"route add {NEIGHBOUR} dev eth0")
    two.near.ip(f"address add {NEIGHBOUR}/24 dev eth0", f"route add {pod}/32 dev eth0")
    yield
    two.near.ip(f"route del {pod}/32 dev eth0", f"address del {NEIGHBOUR}/24 dev eth0")
    two.far.ip(f"route del {NEIGHBOUR} dev eth0")


@second_address
@pytest.mark.usefixtures("on_link")
def test_route_without_source_and_gateway(two: TwoNodes) -> None:
    """The flow tables take the source that the node's own sockets have, the device's first address;
    the kernel's masquerading takes the one in the network of the endpoint.
    """
    assert chosen(two, v6=False) == two.near.v4
    assert masqueraded_by_kernel(two, v6=False) == NEIGHBOUR
    expected = NEIGHBOUR if two.engine is Engine.NETFILTER else two.near.v4
    wait_until("the source", lambda: seen(two, v6=False) == expected)


@pytest.fixture
def public(two: TwoNodes) -> Iterator[None]:
    """The endpoint has a global address too, and the node a third one: two global, and a ULA."""
    near, far, pod = two.near, two.far, two.there
    near.ip(f"address add {THIRD}/64 dev eth0", f"route add {GLOBAL} via {far.v6}")
    far.ip(f"route add {THIRD} dev eth0", f"route add {GLOBAL} via {pod.v6}")
    pod.ip(f"address add {GLOBAL}/128 dev eth0")
    named = [{"name": "tcp", "port": TARGET, "protocol": "TCP"}]
    ports = [{**named[0], "port": PORT, "nodePort": PUBLIC.nodeport}]
    endpoint = manifests.endpoint(GLOBAL, node=far.name, target=pod.name)
    two.publish(
        two.service("web", 10, pod),
        manifests.service("public", PUBLIC.cluster, ports, type="NodePort"),
        manifests.endpoint_slice("public", "IPv6", [endpoint], named),
    )
    yield
    two.publish(two.service("web", 10, pod))
    pod.ip(f"address del {GLOBAL}/128 dev eth0")
    far.ip(f"route del {THIRD} dev eth0", f"route del {GLOBAL}")
    near.ip(f"route del {GLOBAL}", f"address del {THIRD}/64 dev eth0")


@second_address
@pytest.mark.usefixtures("public")
def test_each_destination_has_the_kernels_choice_of_several(two: TwoNodes) -> None:
    """With two global addresses and a unique local one, by the destination of each flow."""
    own = requests.udp(two.sockets(two.near), GLOBAL, TARGET).source
    assert own == THIRD
    where = PUBLIC.to("nodeport", two.near, v6=True)
    wait_until("the source", lambda: requests.tcp(two.sockets(two.outside), *where).source == THIRD)
    assert seen(two, v6=True) == two.near.v6


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


@unnumbered
@families
def test_the_kernel_masquerades_so_by_an_unnumbered_uplink(two: TwoNodes, v6: bool) -> None:
    """What the node's own packets have as their source, its masquerading has too."""
    assert masqueraded_by_kernel(two, v6=v6) == chosen(two, v6=v6)
