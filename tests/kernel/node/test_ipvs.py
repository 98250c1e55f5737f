# SPDX-License-Identifier: Apache-2.0
"""Leftovers of the ipvs mode other than rules: ipsets, its device, virtual servers."""

from ipaddress import ip_address

import pytest

from ebpflb.kernel.node import kube_proxy
from ebpflb.model.kube_proxy import DEVICE, IPVS_SYSCTLS, NODE_PORTS, SETS, VirtualServer
from tests.kernel.node import nodes
from tests.kernel.node.nodes import TOOLS, make_sets, run
from tests.kit import needs

pytestmark = pytest.mark.usefixtures("fresh_netns")


def test_other_sets() -> None:
    """ipsets of other programs stay."""
    run("ipset", "create", "KUBE-NETPOL-1", "hash:ip")
    run("ipset", "create", "KUBE-CLUSTER-IP", "hash:ip,port")
    assert nodes.remove() == ["ipset KUBE-CLUSTER-IP"]
    assert kube_proxy.ipsets() == {"KUBE-NETPOL-1"}


@pytest.mark.parametrize(("family", "member"), [("inet", "192.0.2.1"), ("inet6", "2001:db8::1")])
def test_node_ports_of_sctp(family: str, member: str) -> None:
    """NodePorts of SCTP are in a set of addresses and ports."""
    name = NODE_PORTS["SCTP"][family == "inet6"]
    assert name in SETS
    run("ipset", "create", name, "hash:ip,port", "family", family)
    run("ipset", "add", name, f"{member},sctp:30090")
    assert kube_proxy.service_ports(name) == {30090}


def test_virtual_servers() -> None:
    """Servers at kube-ipvs0's addresses and at NodePorts are removed; all others stay, and are
    named.
    """
    needs.ipvs()
    make_sets(TOOLS[0])
    for words in (
        "link set lo up",
        f"link add {DEVICE} type bridge",
        f"address add 10.96.0.10 dev {DEVICE}",
        f"address add fd00:96::10 dev {DEVICE} nodad",
    ):
        run("ip", *words.split())
    its = ["10.96.0.10:80", "[fd00:96::10]:80", "127.0.0.1:30080"]
    for where in (*its, "127.0.0.1:443"):
        run("ipvsadm", "-A", "-t", where, "-s", "rr")
    run("ipvsadm", "-A", "-f", "1", "-s", "rr")
    assert kube_proxy.survey().retained == [
        "virtual servers of IPVS that may be others': 127.0.0.1:443/TCP"
    ]
    assert "3 virtual servers of IPVS, with 0 connections" in nodes.remove()
    assert kube_proxy.virtual_servers() == [VirtualServer("TCP", ip_address("127.0.0.1"), 443)]
    assert "FWM" in run("ipvsadm", "-L", "-n")


def test_the_device_goes_behind_the_sysctls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean-up that was killed between them finds the sysctls again, by the device."""
    run("ip", "link", "add", DEVICE, "type", "bridge")
    monkeypatch.setattr(kube_proxy, "read_sysctl", lambda name: IPVS_SYSCTLS[name][0])
    *sysctls, device = [each.what for each in kube_proxy.survey().removable]
    assert {it.split("=")[0] for it in sysctls} >= {"net.ipv4.vs.conntrack"}
    assert device == f"device {DEVICE}"
