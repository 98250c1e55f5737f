# SPDX-License-Identifier: Apache-2.0
"""Load balancers' addresses that behave like a host's: pings, and ports that no Service has.

The router leads the addresses to the node `near`, even from the node itself: packets that the node
sends back loop until their TTL ends.
"""

import json
import subprocess
from subprocess import PIPE
from typing import Any, NamedTuple

import pytest

from ebpflb.lab import cni
from ebpflb.lab.hosts import Host
from tests.kit import pings, requests, two_nodes
from tests.kit.lab_cluster import PORT
from tests.kit.parameters import families
from tests.kit.requests import Send
from tests.kit.two_nodes import CLUSTER_CIDR, SERVICE_NETWORKS, Frontends, TwoNodes

WEB = Frontends(10)
UNKNOWN = 81
A_MOMENT = 1.0  # seconds; an answer that comes later would not count
SETTINGS = ["off", "reject"]  # of unknown ports; "off" is without any option


_COUNTED = """table inet counted {
chain leaving { type filter hook postrouting priority 0;
oifname eth0 ip daddr %s counter
oifname eth0 ip6 daddr %s counter
}
}
"""


class Vips(NamedTuple):
    """The nodes, and the agents' setting for unknown ports; unless "off", they answer pings."""

    two: TwoNodes
    setting: str

    def ping(self, host: Host, address: str, size: int = 56) -> str:
        process = host.python(pings.PROGRAM, address, str(size), str(A_MOMENT), stdout=PIPE)
        said, _ = process.communicate(timeout=60)
        return str(said).partition(" ")[0].strip()

    def asked(self, host: Host, send: Send, where: tuple[str, int]) -> str:
        """Return the result of a request: "answered", "refused" or "silent"."""
        try:
            found = requests.is_answered(send, self.two.sockets(host), where, A_MOMENT)
        except ConnectionRefusedError:
            return "refused"
        except OSError:  # TCP is told of the loop
            return "silent"
        return "answered" if found else "silent"


def _lead_back(two: TwoNodes) -> None:
    router = two.lab.router
    for network in SERVICE_NETWORKS[2:]:
        router.ip(f"route add {network} via {two_nodes.address(two.near, network)}")
    for number, node in ((1, two.near), (2, two.far)):
        for network in cni.network(number):
            via = f"{network} via {two_nodes.address(node, network)}"
            router.ip(f"route add {via}", f"route add {via} table 100")
    for host, devices in ((two.near, ("all", "eth0")), (router, ("all", "nodes"))):
        for device in devices:
            host.sysctl(f"net.ipv4.conf.{device}.send_redirects", 0)
        host.sysctl("net.ipv4.icmp_ratelimit", 0)
        host.sysctl("net.ipv6.icmp.ratelimit", 0)
    two.near.nft(_COUNTED % SERVICE_NETWORKS[2:])


two = two_nodes.fixture(prepare=_lead_back)


@pytest.fixture(scope="module", params=SETTINGS)
def vips(two: TwoNodes, request: pytest.FixtureRequest) -> Vips:
    """Start the near node's agent again with each setting."""
    setting: str = request.param
    options = [f"--load-balancer-unknown-ports={setting}", "--answer-pings"]
    two.restart(*CLUSTER_CIDR, *(options if setting != "off" else []))
    return Vips(two, setting)


@families
@pytest.mark.parametrize("kind", ["balancer", "external", "cluster"])
def test_pings_from_outside(vips: Vips, kind: str, v6: bool) -> None:
    """Pings of any size are answered while an endpoint serves; otherwise they may loop."""
    two, off = vips.two, vips.setting == "off"
    address = WEB.to(kind, two.near, v6=v6)[0]
    two.publish(two.service("web", 10, two.there))
    served = {"balancer": "looped", "external": "looped", "cluster": "refused"}[kind]
    for size in (0, 56, 1400):
        assert vips.ping(two.outside, address, size) == (served if off else "answered")
    two.publish(two.service("web", 10))
    without = "looped" if off else "refused"
    expected = {"balancer": without, "external": "looped", "cluster": "refused"}
    assert vips.ping(two.outside, address) == expected[kind]


@families
@pytest.mark.parametrize("send", [requests.tcp, requests.connected_udp])
@pytest.mark.parametrize("served", [True, False])
def test_unknown_ports(vips: Vips, send: Send, v6: bool, served: bool) -> None:
    """The setting is applied, and no packet returns to the router.

    The Service's own port is served, or refused without an endpoint.
    """
    two = vips.two
    address = WEB.balancer[v6]
    two.publish(two.service("web", 10, *([two.there] if served else [])))
    assert vips.asked(two.outside, send, (address, PORT)) == ("answered" if served else "refused")
    before = sent_back(two)
    found = vips.asked(two.outside, send, (address, UNKNOWN))
    looped = sent_back(two) - before
    if vips.setting == "off":  # as with kube-proxy
        assert (found, looped > 20) == ("silent", True)
    else:
        assert (found, looped) == ("refused", 0)


def sent_back(two: TwoNodes) -> int:
    """Return how many packets for services' addresses near has sent to the router."""
    words = [*two.near.enter, "nft", "-j", "list", "table", "inet", "counted"]
    rules: dict[str, Any] = json.loads(subprocess.run(words, check=True, stdout=PIPE).stdout)
    found = [item["rule"]["expr"] for item in rules["nftables"] if "rule" in item]
    return sum(part["counter"]["packets"] for expr in found for part in expr if "counter" in part)
