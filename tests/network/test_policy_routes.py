# SPDX-License-Identifier: Apache-2.0
"""Pods whose packets leave by an uplink of their own, as with the AWS VPC CNI, and NodePorts.

A rule in PREROUTING marks connections to the node's own addresses, and the mark leads replies to
the main uplink. Translated requests have the pod as destination there, and are not marked: their
replies are routed to the second uplink, from where the network accepts only the pods' addresses.
"""

from collections.abc import Iterator

import pytest

from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import NODEPORT, started
from tests.kit.parameters import families
from tests.kit.policy_routed import PolicyRouted
from tests.kit.requests import Send

policies = pytest.mark.parametrize("policy", ["Cluster", "Local"])


@pytest.fixture(scope="module")
def routed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PolicyRouted]:
    """Run with these options; a test leaves its rules as they were."""
    options = request.param
    if "--packet-path=netfilter" in options:
        two_nodes.require(Engine.NETFILTER)
    folder = tmp_path_factory.mktemp("routed")
    with started(lambda lab: PolicyRouted(lab, folder, *options)) as made:
        yield made


flows = pytest.mark.parametrize("routed", [("--packet-path=flows",)], indirect=True, ids=["flows"])
netfilter = pytest.mark.parametrize(
    "routed", [("--packet-path=netfilter",)], indirect=True, ids=["netfilter"]
)


@netfilter
def test_netfilter_needs_no_option(routed: PolicyRouted) -> None:
    """There the rule that marks sees requests to NodePorts."""
    routed.serve("Local")
    answer = requests.tcp(routed.sockets(routed.outside), routed.node.v4, NODEPORT)
    assert answer.name == "web-1"


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
    rule = f"iif veth11 to {clients} lookup main priority 1000"
    routed.serve(policy)
    where = routed.node.v6 if v6 else routed.node.v4
    sends: list[Send] = [requests.tcp, requests.udp, requests.connected_udp]
    routed.node.ip(f"rule add {rule}", v6=v6)
    try:
        for send in sends:
            assert send(routed.sockets(routed.outside), where, NODEPORT).name == "web-1"
    finally:
        routed.node.ip(f"rule del {rule}", v6=v6)


FIREWALL = """
table inet firewall {
    chain forward {
        type filter hook forward priority 0;
        meta mark & 0x4000 == 0x4000 accept
        ct state invalid counter drop
    }
}
"""


@pytest.mark.parametrize(
    "routed",
    [("--packet-path=flows", "--reply-path=request-device", "--packet-mark=0x4000/0x4000")],
    indirect=True,
    ids=["request-device-and-mark"],
)
def test_firewall_accepts_the_mark(routed: PolicyRouted) -> None:
    """conntrack sees half of the connection: where what is invalid is dropped it takes the mark."""
    routed.serve("Local")
    routed.node.nft(FIREWALL)
    assert routed.echo(routed.outside, routed.node.v4, NODEPORT) == "web-1"
    routed.node.nft("delete table inet firewall")
    routed.node.nft(FIREWALL.replace("meta mark & 0x4000 == 0x4000 accept", ""))
    with requests.tcp_socket(routed.sockets(routed.outside), routed.node.v4) as client:
        client.settimeout(1)
        client.connect((routed.node.v4, NODEPORT))
        client.send(b"question")
        with pytest.raises(TimeoutError):
            client.recv(100)
