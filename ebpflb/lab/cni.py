# SPDX-License-Identifier: Apache-2.0
"""A pod network as the CNI plugin bridge builds it. Node N has 10.244.N.0/24 and fd00:244:N::/64.

The pods are attached to a bridge, cni0; other nodes' pods are routed through their node.
"""

from typing import Protocol

from ebpflb.lab.netns import Namespace
from ebpflb.lab.router import NODES, lasting_mac

NETWORKS = ("10.244.0.0/16", "fd00:244::/32")  # of all pods


def network(node: int) -> tuple[str, str]:
    """Return the IPv4 and IPv6 prefixes of a node's pod network."""
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
    """A bridge. ``hairpin`` is the hairpin mode of its ports (hairpinMode of the CNI plugin)."""

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
        pod.connect(addresses(node, number), addresses(node, 1))

    def reach(self, host: Namespace, node: int, other: int) -> None:
        for there, gateway in zip(network(other), NODES.addresses(other), strict=True):
            host.ip(f"route add {there} via {gateway}")
