# SPDX-License-Identifier: Apache-2.0
"""Rules of kube-proxy, kubelet and CNIs, which every node has, are not named."""

import pytest

from ebpflb.kernel.netfilter.firewall import Tool, tables
from tests.kernel.node import nodes, rules
from tests.tools.firewall.services import search, services, where

pytestmark = pytest.mark.usefixtures("fresh_netns")
tools = pytest.mark.parametrize("tool", nodes.TOOLS, ids=lambda tool: tool.name)
flows = pytest.mark.parametrize("early", [False, True], ids=["netfilter", "flows"])


def found(*, early: bool) -> list[str]:
    """Return the named rules, of all rules in this namespace."""
    unread = list[str]()
    named = search(list(tables(unread)), services(early=early))
    assert not unread
    return [": ".join(where(line)) for line in named]


@flows
@tools
def test_kube_proxy(tool: Tool, early: bool) -> None:
    """No rule of kube-proxy is named, whatever its mode, nor any of ebpflb's own."""
    nodes.load(tool, rules.IPTABLES_MODE)
    nodes.load_nft()
    own = "type filter hook prerouting priority -300; tcp dport 30080 drop"
    nodes.run("nft", "-f", "-", said=f"table inet ebpflb-nat {{ chain hold {{ {own} ; }} ; }}")
    assert not found(early=early)


@flows
@tools
def test_kubelet_and_cnis(tool: Tool, early: bool) -> None:
    """No rule of kubelet, Calico or portmap for ports and addresses without a service is named."""
    calico = rules.CALICO.replace("30080", "30099")
    nodes.load(tool, rules.KUBELET, rules.PORTMAP, calico)
    assert not found(early=early)


@flows
@tools
def test_a_neighbours_rule_for_a_nodeport(tool: Tool, early: bool) -> None:
    """A firewall's rule that drops NodePorts is named, if the NodePorts are not translated before
    it.
    """
    nodes.load(tool, rules.UFW, rules.KUBELET, rules.OPERATOR)
    assert not found(early=early)
    text = "-p tcp -m multiport --dports 30000:32767 -j DROP"
    nodes.load(tool, f"*raw\n:own - [0:0]\n-A PREROUTING -j own\n-A own {text}\nCOMMIT\n")
    assert found(early=early) == ([] if early else [f"own: {text}"])
