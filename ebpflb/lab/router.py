# SPDX-License-Identifier: Apache-2.0
"""The network around the nodes: a router between their segment and the outside.

    nodes    192.0.2.0/24, fd02::/64        the router is .254, ::fe
    outside  198.51.100.0/24, fd03::/64     the router is .254, ::fe

It routes between these two and drops packets to other networks, such as those of service
addresses. ``lead`` routes a network from outside to a node, as a load balancer does.
"""

from dataclasses import dataclass
from pathlib import Path

from ebpflb.lab.netns import Namespace


@dataclass(frozen=True)
class NetworkSegment:
    """A network at the router; a host's address is the prefix and its number."""

    name: str
    v4: str  # prefix of addresses
    v6: str

    def addresses(self, number: int) -> tuple[str, str]:
        return f"{self.v4}{number}", f"{self.v6}{number}"

    @property
    def gateways(self) -> tuple[str, str]:
        return f"{self.v4}254", f"{self.v6}fe"

    @property
    def networks(self) -> tuple[str, str]:
        return f"{self.v4}0/24", f"{self.v6}/64"


NODES = NetworkSegment("nodes", "192.0.2.", "fd02::")
OUTSIDE = NetworkSegment("outside", "198.51.100.", "fd03::")
LED = 100  # the routing table for packets from outside


class Router(Namespace):
    """A namespace with a bridge for each segment."""

    def build(self, cgroup: Path) -> None:
        self.create(cgroup)
        for number, segment in enumerate((NODES, OUTSIDE)):
            v4, v6 = segment.gateways
            self.ip(
                f"link add {segment.name} address {lasting_mac(number)} type bridge",
                f"link set {segment.name} up",
                f"address add {v4}/24 dev {segment.name}",
                f"address add {v6}/64 dev {segment.name}",
            )
        for other in (False, True):
            rule = f"rule add iif {OUTSIDE.name} lookup {LED}"
            self.ip("route add blackhole default", rule, v6=other)
        self.sysctl("net.ipv4.ip_forward", 1)
        self.sysctl("net.ipv6.conf.all.forwarding", 1)

    def plug(self, host: Namespace, segment: NetworkSegment, number: int) -> None:
        """Connect the host's eth0 to the segment, with addresses and default routes."""
        cable = f"{segment.name}{number}"
        self.ip(
            f"link add {cable} type veth peer name eth0 netns {host.netns}",
            f"link set {cable} master {segment.name} up",
        )
        host.ip("link set eth0 up")
        host.connect(segment.addresses(number), segment.gateways)

    def lead(self, network: str, gateway: str) -> None:
        """Route packets from outside to this network via the node with this address."""
        self.ip(f"route replace {network} via {gateway} table {LED}")


def lasting_mac(number: int) -> str:
    """Return a MAC address for a bridge; the kernel's own choice would change with the bridge's
    ports.
    """
    return f"02:00:00:00:00:{number:02x}"
