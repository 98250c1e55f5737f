# SPDX-License-Identifier: Apache-2.0
"""Which rules of FORWARD may accept a request of a client outside to a pod, and which cannot."""

from ipaddress import ip_address

import pytest

from ebpflb.kernel.netfilter.firewall_rules import Table
from ebpflb.tools.firewall.forwarding import Request, accepts, drops_by_default
from tests.tools.firewall.services import of_iptables

KUBE = (
    "-A FORWARD -j KUBE-FORWARD",
    "-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP",
    "-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT",
    "-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
)
DOCKER = (
    "-A FORWARD -j DOCKER-USER",
    "-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "-A FORWARD -o docker0 -j DOCKER",
    "-A FORWARD -i docker0 ! -o docker0 -j ACCEPT",
    "-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT",
    "-A DOCKER-USER -j RETURN",
)
PODMAN = (
    "-A FORWARD -d 10.88.0.0/16 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "-A FORWARD -s 10.88.0.0/16 -j ACCEPT",
)
CNI_FIREWALL = (  # of the plugin "firewall": requests to pods are left to others
    "-A FORWARD -d 10.244.1.7/32 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "-A FORWARD -s 10.244.1.7/32 -j ACCEPT",
)
NEITHER = {
    "Docker": DOCKER,
    "Podman": PODMAN,
    "the plugin firewall": CNI_FIREWALL,
    "another port": ("-A FORWARD -p tcp -m multiport --dports 22,443 -j ACCEPT",),
    "another protocol": ("-A FORWARD -p udp -j ACCEPT", "-A FORWARD ! -p tcp -j ACCEPT"),
    "all but the uplink": ("-A FORWARD ! -i eth+ -j ACCEPT",),
    "only established": ("-A FORWARD -m state ! --state NEW,INVALID -j ACCEPT",),
}
ACCEPTING = {
    "Flannel": ("-A FORWARD -j FLANNEL-FWD", "-A FLANNEL-FWD -d 10.244.0.0/16 -j ACCEPT"),
    "Calico": ("-A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT",),
    "Cilium": ("-A FORWARD -o cni+ -m comment --comment any->cluster -j ACCEPT",),
    "clients' network": ("-A FORWARD -s 198.51.100.0/24 -j ACCEPT",),
    "the node's network": ("-A FORWARD -s 192.0.2.0/24 -j ACCEPT",),
    "translated": ("-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT",),
    "a rule behind a drop": ("-A FORWARD -o cni0 -j DROP", "-A FORWARD -j ACCEPT"),
    "a drop of others": ("-A FORWARD -s 203.0.113.9/32 -j DROP", "-A FORWARD -j ACCEPT"),
    "an unreadable match": ("-A FORWARD -d 10.244.1.x -j ACCEPT",),
    "a loop": ("-A FORWARD -j END", "-A END -j END", "-A FORWARD -i eth0 -j ACCEPT"),
}


def table(*rules: str, policy: str = "DROP") -> Table:
    chains = {rule.split()[1] for rule in rules} - {"FORWARD"}
    heads = [f":FORWARD {policy} [0:0]", *(f":{chain} - [0:0]" for chain in chains)]
    (parsed,) = of_iptables("\n".join(["*filter", *heads, *rules, "COMMIT"]))
    return parsed


def request(*, marked: bool = True) -> Request:
    """By eth0 to a pod behind cni0, beside docker0 and a bridge of Podman."""
    pod, node = ip_address("10.244.1.7"), ip_address("192.0.2.1")
    bridges = map(ip_address, ("10.244.1.1", "172.17.0.1", "10.88.0.1"))
    return Request(pod, 8080, "cni0", "eth0", frozenset({node}), frozenset({pod, *bridges}), marked)


@pytest.mark.parametrize("rules", NEITHER.values(), ids=NEITHER)
def test_only_kube_proxys_rules_accept(rules: tuple[str, ...]) -> None:
    """What is about other packets does not count; kube-proxy's chains do while they are there."""
    assert not accepts(table(*rules), request(), with_kube_proxy=False)
    both = table(*KUBE, *rules)
    assert not accepts(both, request(), with_kube_proxy=False)
    assert accepts(both, request(), with_kube_proxy=True)
    assert not accepts(both, request(marked=False), with_kube_proxy=True)


@pytest.mark.parametrize("rules", ACCEPTING.values(), ids=ACCEPTING)
def test_another_rule_accepts(rules: tuple[str, ...]) -> None:
    """Also one that may accept only some requests."""
    assert accepts(table(*rules), request(), with_kube_proxy=False)
    assert accepts(table(*DOCKER, *rules), request(), with_kube_proxy=False)


def test_the_policy() -> None:
    """It decides what no rule does; a last rule may do the same."""
    assert not drops_by_default(table(policy="ACCEPT"))
    reject = "-A FORWARD -j REJECT --reject-with icmp-host-prohibited"
    for found in (table(), table(*DOCKER, reject, policy="ACCEPT")):
        assert drops_by_default(found)
        assert not accepts(found, request(), with_kube_proxy=False)
