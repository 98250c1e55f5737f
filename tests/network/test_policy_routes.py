# SPDX-License-Identifier: Apache-2.0
"""Pods whose packets leave by an uplink of their own, as with the AWS VPC CNI, and NodePorts.

A rule in PREROUTING marks connections to the node's own addresses, and the mark leads replies to
the main uplink. Translated requests have the pod as destination there, and are not marked: their
replies are routed to the second uplink, from where the network accepts only the pods' addresses.
"""

from collections.abc import Iterator

import pytest

from ebpflb.kernel.netfilter.iptables import Tool
from ebpflb.model.packet_path import Engine
from ebpflb.tools.firewall.survey import survey
from tests.kernel.node import nodes
from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import NODEPORT, started
from tests.kit.parameters import families
from tests.kit.policy_routed import MARKS, PolicyRouted
from tests.kit.requests import Send

policies = pytest.mark.parametrize("policy", ["Cluster", "Local"])


@pytest.fixture(scope="module")
def routed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PolicyRouted]:
    """With these options; a test leaves its rules as they were."""
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


def said(routed: PolicyRouted) -> list[tuple[str, str]]:
    """What `ebpflb check` says of the node's rules."""
    with nodes.entered(routed.node.netns):
        return survey(routed.agent.paths.state, Engine.FLOWS).found


@flows
def test_check_says_what_to_do(routed: PolicyRouted) -> None:
    """The rule that marks is named, and the remedies are those that the tests below try."""
    routed.serve("Local")
    ((line, remedy),) = said(routed)
    assert line.startswith("table inet aws, chain prerouting: handle ")
    assert "may not match requests to NodePort 30080 (default/web:" in line
    assert remedy.startswith("--reply-path=request-device, or ")
    assert "ip rule add iif <pod's device> to <clients> lookup main" in remedy
    assert "--packet-path=netfilter" in remedy


@netfilter
def test_check_is_content_with_netfilter(routed: PolicyRouted) -> None:
    """There the rule sees requests to NodePorts, and the remedy is not needed."""
    routed.serve("Local")
    assert not said(routed)
    answer = requests.tcp(routed.sockets(routed.outside), routed.node.v4, NODEPORT)
    assert answer.name == "web-1"


AWS = """
*mangle
-A PREROUTING -i eth0 -m comment --comment "AWS, primary ENI" -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-xmark 0x80/0x80
-A PREROUTING -i eni+ -m comment --comment "AWS, primary ENI" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
COMMIT
"""  # noqa: E501


@flows
@pytest.mark.parametrize("tool", [t for t in nodes.TOOLS if t.family == "iptables"])
def test_check_knows_the_rules_of_the_aws_vpc_cni(routed: PolicyRouted, tool: Tool) -> None:
    """In both variants of iptables, as it writes them; of the two only the one that marks."""
    routed.serve("Cluster")
    routed.node.nft("delete table inet aws")
    with nodes.entered(routed.node.netns):
        tool.restore(AWS)
    try:
        ((line, remedy),) = said(routed)
    finally:
        with nodes.entered(routed.node.netns):
            tool.restore("*mangle\n-F PREROUTING\nCOMMIT\n")
        routed.node.nft(MARKS)
    assert "--dst-type LOCAL" in line
    assert "lookup main" in remedy


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


to_device = pytest.mark.parametrize(
    "routed",
    [("--packet-path=flows", "--reply-path=request-device")],
    indirect=True,
    ids=["request-device"],
)


@to_device
@families
@policies
def test_by_request_device(routed: PolicyRouted, policy: str, v6: bool) -> None:
    """With --reply-path=request-device NodePorts work under both policies, in every protocol."""
    routed.serve(policy)
    where = routed.node.v6 if v6 else routed.node.v4
    client = routed.outside.v6 if v6 else routed.outside.v4
    sends: list[Send] = [requests.tcp, requests.udp, requests.connected_udp]
    for send in sends:
        answer = send(routed.sockets(routed.outside), where, NODEPORT)
        assert answer.name == "web-1"
        if policy == "Local":
            assert answer.source == client
    assert routed.echo(routed.outside, where, NODEPORT) == "web-1"
    fragments = requests.fragmented(routed.sockets(routed.outside), where, NODEPORT)
    assert fragments.name == "web-1"


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
