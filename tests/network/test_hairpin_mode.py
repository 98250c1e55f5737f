# SPDX-License-Identifier: Apache-2.0
"""A pod that reaches itself by its service, on a bridge with and without hairpin mode.

The kernel's own rules show what NAT needs, kube-proxy's too: with br_netfilter the bridge
sends the translated request on itself, to the port that it came in by.
"""

import subprocess
from socket import SOCK_STREAM

import pytest

from ebpflb.kernel.node.device_watch import list_devices
from ebpflb.kernel.node.sysctls import bridge_calls
from ebpflb.lab.hosts import Host
from ebpflb.model.addresses import Family
from ebpflb.model.packet_path import SYSCTLS, unsuited
from tests.kernel.node import nodes
from tests.kit import needs, requests
from tests.kit.lab_cluster import PORT, TARGET, TRAFFIC, new_lab
from tests.kit.parameters import families
from tests.kit.sockets import Sockets

VIPS = {Family.IPV4: "10.96.0.10", Family.IPV6: "fd00:96::10"}
RULES = """
table inet kernel {{
  chain d {{
    type nat hook prerouting priority dstnat
    ip daddr 10.96.0.10 tcp dport 80 dnat ip to {v4}:8080
    ip6 daddr fd00:96::10 tcp dport 80 dnat ip6 to [{v6}]:8080
  }}
  chain s {{
    type nat hook postrouting priority srcnat
    ip saddr {v4} ip daddr {v4} masquerade
    ip6 saddr {v6} ip6 daddr {v6} masquerade
  }}
}}
"""


pytestmark = needs.bridge_netfilter


def set_port(node: Host, number: int, hairpin: str) -> None:
    node.ip(f"link set veth{number} type bridge_slave hairpin {hairpin}")


def times_out(sockets: Sockets, kind: int, to: tuple[str, int]) -> bool:
    """Whether a request is not answered within a second."""
    with sockets.open(requests.family_of(to[0]), kind) as client:
        client.settimeout(1.0)
        try:
            client.connect(to)
            client.send(b"?")
            client.recv(64)
        except TimeoutError:
            return True
    return False


@families
@pytest.mark.parametrize("calls", [0, 1], ids=["without br_netfilter", "with br_netfilter"])
def test_the_kernels_rules_need_hairpin_mode_only_with_br_netfilter(v6: bool, calls: int) -> None:
    """And ``unsuited`` recognizes the port. Promiscuous mode of the bridge, which helps on older
    kernels, does not count.
    """
    with new_lab() as lab:
        node = lab.node("node", 1)
        pod = lab.pod(node, "twin", 12, hooked=False)
        lab.keep_ready(pod.python(TRAFFIC, "serve", "twin", str(TARGET), stdout=subprocess.PIPE))
        node.nft(RULES.format(v4=pod.v4, v6=pod.v6))
        for name in SYSCTLS.values():
            node.sysctl(name.replace("/", "."), calls)
        sockets = Sockets(pod)
        to = (VIPS[Family.IPV6 if v6 else Family.IPV4], PORT)
        for hairpin, promiscuous in (("off", "off"), ("off", "on"), ("on", "off")):
            set_port(node, 12, hairpin)
            node.ip(f"link set cni0 promisc {promiscuous}")
            works = not calls or hairpin == "on"
            if works:
                assert requests.tcp(sockets, *to).name == "twin"
            elif promiscuous == "off":
                assert times_out(sockets, SOCK_STREAM, to)
            with nodes.entered(node.netns):
                found = unsuited(list_devices().devices, (), bridge_calls())
            if calls:
                assert (found is None) == works
                assert works or "veth12 on the bridge cni0" in str(found)
        sockets.close()
