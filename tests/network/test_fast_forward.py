# SPDX-License-Identifier: Apache-2.0
"""--fast-forward with the flow tables, to endpoints on the node: rules see how a flow begins. From
then on its requests are handed to the pod without a stack, if the pod is where the kernel would
send them.

Each test runs with pods on a bridge, and with pods that have a route each. The client is outside; a
counter in FORWARD counts the packets of its flows.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.lab import cni
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit import firewall
from tests.kit.cluster import ServingOutside, serving_outside
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import families
from tests.kit.pod_networks import Ptp
from tests.kit.sockets import Socket

BOTH = (False, True)  # families
NETWORKS: dict[str, cni.Cni] = {"bridge": cni.Bridge(), "routed": cni.Routed(), "ptp": Ptp()}
SEEN = 19  # packets of each direction that pass the stack
MORE = 40
VETH, POD = "veth11", 11  # of web-1

both_protocols = pytest.mark.parametrize("kind", [SOCK_STREAM, SOCK_DGRAM], ids=["tcp", "udp"])


@pytest.fixture(scope="module", params=NETWORKS)
def fast(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServingOutside]:
    folder, network = tmp_path_factory.mktemp("fast"), NETWORKS[request.param]
    with serving_outside(folder, Engine.FLOWS, "--fast-forward", network=network) as made:
        yield made


@pytest.fixture
def node(fast: ServingOutside) -> Iterator[ServingOutside]:
    """web-1 is the endpoint; the test's thread is in the node's namespace."""
    counted = [f"{word} {TARGET} counter name seen" for word in ("th dport", "th sport")]
    chain = firewall.chain(
        "forward", "filter", *(f"meta l4proto {{ tcp, udp }} {c}" for c in counted)
    )
    rules = firewall.rules(fast.node, f"counter seen {{ }}\n{chain}")
    with nodes.entered(fast.node.netns), rules:
        fast.serve(fast.web[0])
        wait_until("the way into the pod is known", lambda: all(is_known(fast, v6) for v6 in BOTH))
        yield fast


def is_known(node: ServingOutside, v6: bool = False) -> bool:
    """Whether the map has a way into web-1; else one request makes the kernel look for it."""
    pod = node.web[0]
    known = node.maps["pod_devices"].get(ip_address(pod.v6 if v6 else pod.v4)) is not None
    if not known:
        node.sockets(node.node).open(AF_INET6 if v6 else AF_INET, SOCK_DGRAM).sendto(
            b"?", (pod.v6 if v6 else pod.v4, TARGET)
        )
    return known


def seen(node: ServingOutside) -> int:
    """Packets in FORWARD until now, from and to endpoints."""
    said = json.loads(nodes.run("nft", "-j", "list", "counter", "inet", "firewall", "seen"))
    return int(said["nftables"][-1]["counter"]["packets"])


def sent_by_the_nodes_end(node: ServingOutside) -> int:
    """Packets that the node's end of web-1's veth has sent."""
    (link,) = json.loads(nodes.run("ip", "-json", "-stats", "link", "show", VETH))
    return int(link["stats64"]["tx"]["packets"])


def goes_on(client: Socket) -> bool:
    client.send(b"still here")
    return bool(client.recv(64))


def exchange(client: Socket, times: int) -> None:
    for _ in range(times):
        assert goes_on(client)


def passed(count: Callable[[], int], done: Callable[[], object]) -> int:
    before = count()
    done()
    return count() - before


def goes_past(node: ServingOutside, client: Socket) -> bool:
    """Whether neither chains nor the veth's end see most packets of a few exchanges."""
    seen_there = passed(
        lambda: seen(node) + sent_by_the_nodes_end(node), lambda: exchange(client, 8)
    )
    return seen_there < 8


@families
def test_rules_see_how_a_flow_begins(node: ServingOutside, v6: bool) -> None:
    """Of datagrams exactly the first 19 of each direction. Later ones are not sent by the node's
    end of the pod's device either.
    """
    before = seen(node)
    client = node.connection(SOCK_DGRAM, v6=v6)
    exchange(client, SEEN - 1)
    assert seen(node) - before == 2 * SEEN
    assert goes_past(node, client)
    client.close()


@families
def test_short_connections_are_seen_whole(node: ServingOutside, v6: bool) -> None:
    """With three exchanges nothing of them is past the rules, whatever the connections before."""
    for _ in range(3):
        packets = passed(lambda: seen(node), lambda: short(node, v6=v6))
        assert packets >= 3 + 6 + 3  # handshake, exchanges and answers, ends


def short(node: ServingOutside, *, v6: bool) -> None:
    client = node.connection(v6=v6)
    exchange(client, 3)
    client.close()
    wait_until("it has ended", lambda: ended(node))


def ended(node: ServingOutside) -> bool:
    return all(it.flags & {"fin", "rst"} for _, it in node.maps["tcp_flows"].items())


@families
@both_protocols
def test_large_exchange(node: ServingOutside, kind: int, v6: bool) -> None:
    """It goes on past the stack, also while no agent runs."""
    client = node.connection(kind, v6=v6)
    exchange(client, SEEN)
    wait_until("it goes past the stack", lambda: goes_past(node, client))
    node.agent.stop()
    assert goes_past(node, client), "while no agent runs too"
    node.agent.start()
    exchange(client, MORE)
    client.close()


@families
def test_segments_of_any_size(node: ServingOutside, v6: bool) -> None:
    """Megabytes come back unchanged, in segments larger than the device takes."""
    where = node.node.v6 if v6 else node.node.v4
    assert node.echo(node.outside, where, 30080, size=4 << 20) == node.web[0].name


def test_an_endpoint_that_is_removed(node: ServingOutside) -> None:
    """Its TCP connections go on; datagrams get the other endpoint, and rules see them again."""
    stream, datagrams = node.connection(), node.connection(SOCK_DGRAM)
    for client in (stream, datagrams):
        exchange(client, SEEN)
        wait_until("it goes past the stack", lambda: goes_past(node, client))  # noqa: B023
    node.serve(node.web[1])
    assert goes_past(node, stream)
    before = seen(node)
    datagrams.send(b"?")
    assert datagrams.recv(64).split()[0].decode() == node.web[1].name
    assert seen(node) >= before + 2
    stream.close()
    datagrams.close()


@families
def test_a_pods_address_on_another_device(node: ServingOutside, v6: bool) -> None:
    """The pod gets a new device with its address: packets go there, past the stack again."""
    client = node.connection(v6=v6)
    exchange(client, SEEN)
    wait_until("it goes past the stack", lambda: goes_past(node, client))
    pod, map_ = node.web[0], node.maps["pod_devices"]
    former = map_.get(ip_address(pod.v4)).ifindex
    node.node.ip(f"link delete {VETH}")
    wait_until("no way is known", lambda: map_.get(ip_address(pod.v4)) is None)
    plug_again(node, pod)
    exchange(client, SEEN)
    wait_until("the new way is known", lambda: all(is_known(node, it) for it in BOTH))
    assert map_.get(ip_address(pod.v4)).ifindex != former
    wait_until("it goes past the stack", lambda: goes_past(node, client))
    client.close()


def plug_again(node: ServingOutside, pod: Host) -> None:
    """Connect the pod anew; it asks for its gateways, so that they learn its MAC address."""
    node.network.plug(node.node, 1, pod, POD)
    for family, gateway in ((AF_INET, cni.addresses(1, 1)[0]), (AF_INET6, cni.addresses(1, 1)[1])):
        node.sockets(pod).open(family, SOCK_DGRAM).sendto(b"!", (gateway, 9))


def test_auto(node: ServingOutside) -> None:
    """A rule that acts on each packet sees all of them within a second, until it goes."""
    nft = partial(nodes.run, "nft")
    nft("flush", "chain", "inet", "firewall", "forward")  # the test's own counter is such a rule
    node.restart("--fast-forward=auto")
    client = node.connection()
    exchange(client, SEEN)
    wait_until("it goes past the node's end", lambda: goes_past(node, client))
    nft("add rule inet firewall forward meta l4proto tcp log")
    wait_until("it passes the stack", lambda: not goes_past(node, client), seconds=1.5)
    assert "logs each packet" in node.ebpflb("status").stdout
    nft("flush", "chain", "inet", "firewall", "forward")
    wait_until("it goes past the node's end again", lambda: goes_past(node, client))
    client.close()
    node.restart("--fast-forward")


def test_a_limit_of_a_pods_bandwidth(node: ServingOutside) -> None:
    """What is sent to the pod passes the queue at the node's end of its device."""
    client, address = node.connection(), ip_address(node.web[0].v4)
    exchange(client, SEEN)
    wait_until("it goes past the stack", lambda: goes_past(node, client))
    queue = f"dev {VETH} root tbf rate 1gbit burst 1mb latency 50ms".split()
    nodes.run("tc", "qdisc", "add", *queue)
    wait_until("no way is known", lambda: node.maps["pod_devices"].get(address) is None)
    assert passed(lambda: sent_by_the_nodes_end(node), lambda: exchange(client, MORE)) >= MORE
    nodes.run("tc", "qdisc", "del", *queue[:3])
    wait_until("the way is known again", lambda: is_known(node))
    assert goes_past(node, client)
    client.close()
