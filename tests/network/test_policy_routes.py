# SPDX-License-Identifier: Apache-2.0
"""Pods whose packets leave by an uplink of their own, as with the AWS VPC CNI, and NodePorts.

A rule in PREROUTING marks connections to the node's own addresses, and the mark leads replies to
the main uplink. Translated requests have the pod as destination there, and are not marked: their
replies are routed to the second uplink, from where the network accepts only the pods' addresses.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab import cni
from ebpflb.lab.hosts import Lab
from tests.kit import requests
from tests.kit.cluster import endpoint, web
from tests.kit.lab_cluster import NODEPORT, PREFIX, TARGET, LabCluster
from tests.kit.requests import Send

families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
policies = pytest.mark.parametrize("policy", ["Cluster", "Local"])
MARKS = """
table inet aws {
    chain prerouting {
        type filter hook prerouting priority mangle;
        iifname "eth0" fib daddr type local ct mark set 0x80
        iifname "veth*" meta mark set ct mark
    }
}
"""
ONLY_PODS = """
table inet source_check {
    chain forward {
        type filter hook forward priority 0;
        iifname "second" ip saddr != 10.244.0.0/16 drop
        iifname "second" ip6 saddr != fd00:244::/32 drop
    }
}
"""


class PolicyRouted(LabCluster):
    """A node with two uplinks; packets from its pod are routed to the second one, "eth1"."""

    def __init__(self, lab: Lab, folder: Path, *options: str) -> None:
        super().__init__(lab, folder)
        self.node = lab.node("node", 1, cni.Routed())
        self.pod = lab.pod(self.node, "web-1", 11)
        self.outside = lab.outside("outside", 1)
        self.agent = self.add_agent(self.node, *options)
        self.start_program(self.pod, "serve", self.pod.name, str(TARGET))
        self._second_uplink()
        self.node.nft(MARKS)
        lab.router.nft(ONLY_PODS)

    def _second_uplink(self) -> None:
        router, node = self.lab.router, self.node
        router.ip(f"link add second type veth peer name eth1 netns {node.netns}")
        node.ip("link set eth1 up")
        router.ip("link set second up")
        for v6, ours, theirs in (
            (False, "172.31.0.2/30", "172.31.0.1/30"),
            (True, "fd31::2/64", "fd31::1/64"),
        ):
            nodad = " nodad" if v6 else ""
            router.ip(f"address add {theirs} dev second{nodad}")
            node.ip(f"address add {ours} dev eth1{nodad}")
            pod = self.pod.v6 if v6 else self.pod.v4
            gateway = theirs.partition("/")[0]
            node.ip(
                f"route add default via {gateway} dev eth1 table 2",
                "rule add fwmark 0x80/0x80 lookup main priority 1024",
                f"rule add from {pod} lookup 2 priority 1536",
                v6=v6,
            )

    def serve(self, policy: str) -> None:
        self.publish(
            web(
                endpoint(self.pod),
                v6=[endpoint(self.pod, v6=True)],
                nodeport=NODEPORT,
                externalTrafficPolicy=policy,
                ipFamilyPolicy="RequireDualStack",
            )
        )


@pytest.fixture
def routed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PolicyRouted]:
    with Lab(PREFIX) as lab:
        made = PolicyRouted(lab, tmp_path, *getattr(request, "param", ()))
        try:
            made.start()
            yield made
        finally:
            made.close()


flows = pytest.mark.parametrize("routed", [("--packet-path=flows",)], indirect=True, ids=["flows"])


@flows
def test_by_route(routed: PolicyRouted) -> None:
    """Replies are routed as what the pod sends itself, and the network drops them."""
    routed.serve("Local")
    with requests.tcp_socket(routed.sockets(routed.outside), routed.node.v4) as client:
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.connect((routed.node.v4, NODEPORT))


@flows
@families
@policies
def test_by_rule(routed: PolicyRouted, policy: str, v6: bool) -> None:
    """A rule that leads what the pod sends to clients to the main uplink makes NodePorts work."""
    clients = "fd03::/64" if v6 else "198.51.100.0/24"
    routed.node.ip(f"rule add iif veth11 to {clients} lookup main priority 1000", v6=v6)
    routed.serve(policy)
    where = routed.node.v6 if v6 else routed.node.v4
    sends: list[Send] = [requests.tcp, requests.udp, requests.connected_udp]
    for send in sends:
        assert send(routed.sockets(routed.outside), where, NODEPORT).name == "web-1"
