# SPDX-License-Identifier: Apache-2.0
"""A Service that another cluster serves at the same addresses: failover by routing (KEP-6272).

The router leads clients to the node `near`, as long as it has not heard that no endpoint is there.
It leads packets from a node to `site`, which has the addresses and a server, as if the other
cluster had the better route. Answers of `site` do not pass the node.
"""

from typing import NamedTuple

import pytest

from ebpflb.lab import cni
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.model.annotations import FAILOVER_ANNOTATION
from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import PORT
from tests.kit.parameters import families
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

WEB = Frontends(10)
sends = pytest.mark.parametrize("send", [requests.tcp, requests.udp, requests.connected_udp])
kinds = pytest.mark.parametrize("kind", ["balancer", "external"])


class Clusters(NamedTuple):
    """The nodes of this cluster, and a server of another cluster at the same addresses."""

    two: TwoNodes
    site: Host

    def publish(self, *pods: Host, policy: str | None = "Passthrough") -> None:
        self.two.publish(self.service(*pods, policy=policy))

    def service(self, *pods: Host, policy: str | None) -> list[Manifest]:
        found = self.two.service("web", 10, *pods, externalTrafficPolicy="Local")
        found[0]["metadata"]["annotations"] = {FAILOVER_ANNOTATION: policy} if policy else {}
        return found

    def answer(self, host: Host, send: Send, where: tuple[str, int]) -> str:
        """Return who answers; "refused", or "" without an answer."""
        try:
            return send(self.two.sockets(host), *where).name
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return ""


two = two_nodes.fixture()


@pytest.fixture(scope="module")
def clusters(two: TwoNodes) -> Clusters:
    site = two.lab.outside("site", 2)
    for address in (*WEB.balancer, *WEB.external):
        site.ip(f"address add {address} dev lo{' nodad' * (':' in address)}")
        two.lab.router.ip(f"route add {address} via {site.v6 if ':' in address else site.v4}")
        bound = address if ":" in address else f"::ffff:{address}"
        two.start_program(site, "serve", "site", str(PORT), bound)
    for number, node in ((1, two.near), (2, two.far)):
        for network in cni.network(number):
            gateway = node.v6 if ":" in network else node.v4
            two.lab.router.ip(
                f"route add {network} via {gateway}", f"route add {network} via {gateway} table 100"
            )
        node.sysctl("net.ipv4.conf.all.send_redirects", 0)
        node.sysctl("net.ipv4.conf.eth0.send_redirects", 0)
    return Clusters(two, site)


@families
@kinds
@sends
def test_clients_outside_reach_the_other_cluster(
    clusters: Clusters, kind: str, send: Send, v6: bool
) -> None:
    """Clients reach the other cluster while no endpoint is on the node; endpoints on other nodes do
    not matter.
    """
    two, where = clusters.two, WEB.to(kind, clusters.two.near, v6=v6)
    for pods in ([two.there], []):
        clusters.publish(*pods)
        assert clusters.answer(two.outside, send, where) == "site"
    clusters.publish(two.here, two.there)
    assert clusters.answer(two.outside, send, where) == "here"
