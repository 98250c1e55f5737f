# SPDX-License-Identifier: Apache-2.0
"""A connection is translated once: who asks a Service by its cluster IP reaches its endpoint, even
where another tenant's Service claims that endpoint's address and port as its own frontend.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kit import forked, pod_networks, requests, two_nodes
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
    """Each pod has a route: packets from one to another pass the programs, and the stack."""
    how: dict[str, Any] = {"engine": request.param, "network": pod_networks.Routed()}
    folder = tmp_path_factory.mktemp("two")
    with two_nodes.running(folder, *two_nodes.CLUSTER_CIDR, **how) as made:
        yield made


def one_port(
    two: TwoNodes, name: str, frontends: Frontends, pods: Iterable[Host], port: int, target: int
) -> tuple[Manifest, list[Manifest]]:
    """A Service on one port of TCP and UDP, and its slices; in a namespace of its own name."""
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
    """The Service whose external addresses are those of these pods."""
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
    """`explain` says so too. The thief gets only what is sent to the endpoint's address itself."""
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
    """The endpoints of the hooked pod's TCP connections, with their chances."""
    to = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    words = ("explain", to, "--from", address(two.hooked, host), *two.agents[0].where)
    said = json.loads(forked.run(*words, "-o", "json", netns=two.near.netns).stdout)
    return {each["pod"]: each["chance"] for each in said["endpoints"] if each["chance"]}


@families
@connecting
@pytest.mark.parametrize("who", ["hooked", "near"])
@pytest.mark.parametrize("thieves", ["none", "ranges"])
def test_no_rule_of_the_other_service_counts(
    two: TwoNodes, thieves: str, who: str, send: Send, v6: bool
) -> None:
    """It has no endpoint, or admits other clients only. Of the node itself, too, packets to the
    endpoint's own address are refused or dropped, and those to the cluster IP are not.
    """
    claimed = (
        thief(two, two.here, pods=[])
        if thieves == "none"
        else thief(
            two,
            two.here,
            pods=[two.twin],
            claim="ingress",
            loadBalancerSourceRanges=["198.51.100.0/24", "2001:db8::/32"],
        )
    )
    two.publish(two.service("web", 10, two.here), claimed)
    client, to = two.sockets(getattr(two, who)), WEB.to("cluster", two.near, v6=v6)
    assert send(client, *to).name == "here"
    try:
        assert not requests.is_answered(send, client, (address(two.here, to[0]), TARGET), 0.3)
    except OSError:
        assert thieves == "none"
