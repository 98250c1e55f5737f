# SPDX-License-Identifier: Apache-2.0
"""The network around the nodes: a router between their segment and the outside.

    nodes    192.0.2.0/24, fd02::/64        the router is .254, ::fe
    outside  198.51.100.0/24, fd03::/64     here too

It knows these two and swallows everything else, as the networks of service addresses are nobody's;
``lead`` makes one known outside, as a load balancer does. ``narrow`` puts a bottleneck between.
"""

from dataclasses import dataclass
from ipaddress import ip_network

from ebpflb.lab.namespaces import Namespace

FULL = 1500  # bytes


@dataclass(frozen=True)
class Segment:
    """A switched network of the router; hosts have numbers in it."""

    name: str
    v4: str  # what comes before the number
    v6: str

    def addresses(self, number: int) -> tuple[str, str]:
        return f"{self.v4}{number}", f"{self.v6}{number}"

    @property
    def gateways(self) -> tuple[str, str]:
        return f"{self.v4}254", f"{self.v6}fe"

    @property
    def networks(self) -> tuple[str, str]:
        return f"{self.v4}0/24", f"{self.v6}/64"


NODES = Segment("nodes", "192.0.2.", "fd02::")
OUTSIDE = Segment("outside", "198.51.100.", "fd03::")
LED = 100  # the routing table for what comes from outside


class Router(Namespace):
    """Its devices are the bridges of the two segments."""

    def build(self) -> None:
        self.create()
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

    def plug(self, host: Namespace, segment: Segment, number: int) -> None:
        """A cable from the host's eth0 to the segment, with addresses and default routes."""
        cable = f"{segment.name}{number}"
        self.ip(
            f"link add {cable} type veth peer name eth0 netns {host.netns}",
            f"link set {cable} master {segment.name} up",
        )
        host.ip("link set eth0 up")
        both = zip(segment.addresses(number), segment.gateways, (24, 64), strict=True)
        for address, gateway, length in both:
            host.ip(
                f"address add {address}/{length} dev eth0",
                f"route add default via {gateway} dev eth0",
            )

    def lead(self, network: str, gateway: str) -> None:
        """Sends what comes from outside for this network to a node of this address."""
        self.ip(f"route replace {network} via {gateway} table {LED}")

    def narrow(self, mtu: int = FULL) -> None:
        """Packets between the segments are at most ``mtu`` bytes; led networks not counted."""
        for segment in (NODES, OUTSIDE):
            for network in segment.networks:
                self.ip(f"route replace {_table(network)} dev {segment.name} mtu lock {mtu}")


def lasting_mac(number: int) -> str:
    """For a bridge; one of the kernel's choice would change as ports come and go."""
    return f"02:00:00:00:00:{number:02x}"


def _table(network: str) -> str:
    """The words that replace the kernel's own route: IPv6 ones differ by metric."""
    return network if ip_network(network).version == 4 else f"{network} metric 256"
