# SPDX-License-Identifier: Apache-2.0
"""A connection is translated once: a client of a cluster IP reaches that Service's endpoint, even
if another tenant's Service claims the endpoint's address and port as its own frontend.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kernel.node import nodes
from tests.kit import forked, pod_networks, requests, two_nodes
from tests.kit.firewall import chain, rules
from tests.kit.lab_cluster import PORT, TARGET
from tests.kit.parameters import connecting, families
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes, address

WEB, OTHER, THIEF = Frontends(10), Frontends(11), Frontends(66)
KINDS: dict[str, Send] = requests.KINDS | {"fragments": requests.fragmented}
VERDICT = "translated_at_socket"


@pytest.fixture(scope="module", params=two_nodes.ENGINES, ids=str)
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes]:
    """Yield nodes with routed pods: packets between pods pass the programs, and the stack."""
    how: dict[str, Any] = {"engine": request.param, "network": pod_networks.Routed()}
    folder = tmp_path_factory.mktemp("two")
    with two_nodes.running(folder, *two_nodes.CLUSTER_CIDR, **how) as made:
        yield made


def one_port(
    two: TwoNodes, name: str, frontends: Frontends, pods: Iterable[Host], port: int, target: int
) -> tuple[Manifest, list[Manifest]]:
    """Return a Service on one port of TCP and UDP, and slices, in a namespace named after it."""
    named: list[Manifest] = [{"name": p, "protocol": p.upper()} for p in ("tcp", "udp")]
    service = manifests.service(
        name, frontends.cluster, [{**it, "port": port} for it in named], namespace=name
    )
    slices = [
        manifests.endpoint_slice(
            name,
            family,
            two.endpoints(*pods, v6=family == "IPv6"),
            [{**it, "port": target} for it in named],
            namespace=name,
        )
        for family in ("IPv4", "IPv6")
    ]
    return service, slices


def thief(
    two: TwoNodes, *claimed: Host, pods: Iterable[Host], claim: str = "externalIPs", **spec: Any
) -> list[Manifest]:
    """Return the Service whose external addresses are these pods'."""
    service, slices = one_port(two, "thief", THIEF, pods, TARGET, TARGET)
    addresses = [each for host in claimed for each in (host.v4, host.v6)]
    if claim == "ingress":
        service["status"]["loadBalancer"]["ingress"] = [{"ip": each} for each in addresses]
        spec = {"type": "LoadBalancer"} | spec
    else:
        spec["externalIPs"] = addresses
    service["spec"] |= spec
    return [service, *slices]


@families
@pytest.mark.parametrize("claim", ["externalIPs", "ingress"])
@pytest.mark.parametrize("send", KINDS.values(), ids=KINDS)
def test_a_cluster_ip_leads_to_its_own_endpoint(
    two: TwoNodes, send: Send, claim: str, v6: bool
) -> None:
    """Connections reach their own Service's endpoint, and `explain` agrees. The claiming Service
    gets only packets that are sent to the endpoint itself.
    """
    two.publish(
        two.service("web", 10, two.here), thief(two, two.here, pods=[two.twin], claim=claim)
    )
    client, to = two.sockets(two.hooked), WEB.to("cluster", two.near, v6=v6)
    before = two.verdict(VERDICT)
    assert send(client, *to).name == "here"
    assert two.verdict(VERDICT) > before
    direct = address(two.here, to[0])
    assert send(client, direct, TARGET).name == "twin"
    assert explained(two, to[0]) == {"here": 1}
    assert explained(two, direct, TARGET) == {"twin": 1}


def explained(two: TwoNodes, host: str, port: int = PORT) -> dict[str, float]:
    """Return the endpoints of the hooked pod's TCP connections, with their chances."""
    to = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    words = ("explain", to, "--from", address(two.hooked, host), *two.agents[0].where)
    said = json.loads(forked.run(*words, "-o", "json", netns=two.near.netns).stdout)
    return {each["pod"]: each["chance"] for each in said["endpoints"] if each["chance"]}


@families
def test_a_repeated_syn(two: TwoNodes, v6: bool) -> None:
    """The endpoint is claimed while a connection to it opens, after its first SYN was lost."""
    two.publish(web := two.service("web", 10, two.here))
    to = WEB.to("cluster", two.near, v6=v6)
    before = two.verdict(VERDICT)
    with requests.tcp_socket(two.sockets(two.hooked), to[0]) as client:
        with rules(two.near, chain("forward", "filter", "tcp flags syn drop")):
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.connect(to)
            two.publish(web, thief(two, two.here, pods=[two.twin]))
        client.settimeout(60)
        assert client.recv(64).startswith(b"here ")
    assert two.verdict(VERDICT) > before


@families
@connecting
def test_conntrack_forgets(two: TwoNodes, send: Send, v6: bool) -> None:
    """Open connections stay, although their next packet is the first one of the flow for
    conntrack.
    """
    two.publish(two.service("web", 10, two.here), thief(two, two.here, pods=[two.twin]))
    to = WEB.to("cluster", two.near, v6=v6)
    with ExitStack() as stack:
        client = stack.enter_context(requests.socket_of(send, two.sockets(two.hooked), to[0]))
        client.connect(to)
        client.send(b"?")
        assert client.recv(64).startswith(b"here ")
        for word in (b"one", b"two"):
            with nodes.entered(two.near.netns):
                conntrack.delete(conntrack.connections(lambda *_: True))
            client.send(word)
            answer = b""
            while not answer.endswith(word):
                answer += client.recv(64)
