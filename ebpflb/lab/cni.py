# SPDX-License-Identifier: Apache-2.0
"""Three pod networks, as CNI plugins build them; node N's is 10.244.N.0/24 and fd00:244:N::/64.

Bridge   pods are attached to a bridge, cni0; other nodes' pods are routed through their node
Routed   each pod has a veth and a route to it; the node answers all neighbour requests (ARP, ND)
Overlay  as Bridge, but packets to other nodes' pods are sent in VXLAN
"""

from typing import Protocol

from ebpflb.lab.netns import Namespace
from ebpflb.lab.router import NODES, lasting_mac

NETWORKS = ("10.244.0.0/16", "fd00:244::/32")  # of all pods


def network(node: int) -> tuple[str, str]:
    """Return a node's pod network, in both families."""
    return f"10.244.{node}.0/24", f"fd00:244:{node}::/64"


def addresses(node: int, pod: int) -> tuple[str, str]:
    return f"10.244.{node}.{pod}", f"fd00:244:{node}::{pod}"


class Cni(Protocol):
    """The way in which a node's pods are connected."""

    def prepare(self, host: Namespace, node: int) -> None:
        """Set up the node, before its first pod."""

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        """Create a pod's eth0 with its addresses and routes."""

    def reach(self, host: Namespace, node: int, other: int) -> None:
        """Add the routes to another node's pods."""


class Bridge:
    """A bridge. ``hairpin``: the ports' hairpin mode, the bridge plugin's hairpinMode."""

    mtu = 1500

    def __init__(self, *, hairpin: bool = False) -> None:
        self.hairpin = hairpin

    def prepare(self, host: Namespace, node: int) -> None:
        v4, v6 = addresses(node, 1)
        host.ip(
            f"link add cni0 address {lasting_mac(node)} type bridge",
            "link set cni0 up",
            f"address add {v4}/24 dev cni0",
            f"address add {v6}/64 dev cni0",
        )

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        host.ip(
            f"link add veth{number} type veth peer name eth0 netns {pod.netns}",
            f"link set veth{number} master cni0 up mtu {self.mtu}",
            f"link set veth{number} type bridge_slave hairpin {'on' if self.hairpin else 'off'}",
        )
        pod.ip(f"link set eth0 up mtu {self.mtu}")
        both = zip(addresses(node, number), addresses(node, 1), (24, 64), strict=True)
        for address, gateway, length in both:
            pod.ip(
                f"address add {address}/{length} dev eth0",
                f"route add default via {gateway} dev eth0",
            )

    def reach(self, host: Namespace, node: int, other: int) -> None:
        for there, gateway in zip(network(other), NODES.addresses(other), strict=True):
            host.ip(f"route add {there} via {gateway}")


class Overlay(Bridge):
    """VXLAN as in Flannel: a node's VXLAN address is the first one of its pod network.

    Before Linux 5.14 that is a broadcast address, for which no host answers. So the nodes have
    entries for each other's link address.
    """

    mtu = 1450

    def reach(self, host: Namespace, node: int, other: int) -> None:
        here, there = NODES.addresses(node)[0], NODES.addresses(other)[0]
        link = f"link add vxlan0 address {_vxlan_link(node)} type vxlan"
        host.ip(f"{link} id 1 local {here} remote {there} dstport 8472")
        host.ip(f"link set vxlan0 up mtu {self.mtu}")
        for mine, its, whole in zip(_base(node), _base(other), network(other), strict=True):
            host.ip(f"address add {mine} dev vxlan0")
            host.ip(f"neighbour add {its} lladdr {_vxlan_link(other)} dev vxlan0")
            host.ip(f"route add {whole} via {its} dev vxlan0 onlink")


def _vxlan_link(node: int) -> str:
    return f"02:00:00:00:01:{node:02x}"


class Routed:
    """Routes as in Calico: a pod has a gateway address, for which the node answers on every
    veth.
    """

    gateways = ("169.254.1.1", "fe80::1")

    def prepare(self, host: Namespace, node: int) -> None:
        """Do nothing."""

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        veth = f"veth{number}"
        host.ip(f"link add {veth} type veth peer name eth0 netns {pod.netns}")
        self.connect(host, veth, pod, addresses(node, number))

    def connect(
        self, host: Namespace, device: str, pod: Namespace, addresses: tuple[str, str]
    ) -> None:
        """Give the pod's eth0 addresses and routes; ``device`` is the other end."""
        host.sysctl(f"net.ipv4.conf.{device}.proxy_arp", 1)
        host.ip(f"link set {device} up", f"address add {self.gateways[1]}/64 dev {device}")
        pod.ip("link set eth0 up")
        for address, gateway in zip(addresses, self.gateways, strict=True):
            pod.ip(f"address add {address} dev eth0")
            pod.ip(f"route add default via {gateway} dev eth0 onlink")
            host.ip(f"route add {address} dev {device}")

    def reach(self, host: Namespace, node: int, other: int) -> None:
        Bridge().reach(host, node, other)


def _base(node: int) -> tuple[str, str]:
    return f"10.244.{node}.0", f"fd00:244:{node}::"
