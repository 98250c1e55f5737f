# SPDX-License-Identifier: Apache-2.0
"""Addresses of the simulated cluster, the requests to them, and the clients.

An IPv6 address is ``fd00::`` and the 32 bits of an IPv4 address: so 32 bits identify an address of
either family, and an outcome is a number.
"""

from functools import cache
from ipaddress import IPv4Address, ip_address
from socket import htons
from typing import NamedTuple

from ebpflb.kernel.maps.layout import VERDICTS

IPS, PORTS = 3, {"web": (80, "TCP"), "dns": (53, "UDP"), "alt": (443, "TCP")}
EXTERNAL_PORTS = ("web", "dns")  # those of which NodePorts and load balancers are asked
NUMBERS = {"TCP": 6, "UDP": 17}
FAMILIES = (4, 6)
NODE = "node-1"
NODE_ADDRESS, LOOPBACK = "192.0.2.1", "127.0.0.1"
POD_CIDR, INSIDE_RANGE, NODE_RANGE = "10.1.0.0/16", "203.0.113.0/24", "192.0.2.0/24"
HOST_NETNS, POD_NETNS, OTHER_NETNS = 1, 7, (8, 9, 10)
Place = tuple[str, int]
Where = tuple[str, int, str]
"""A frontend: address, port, protocol."""


class Asking(NamedTuple):
    """A client; ``name`` is one of the names that ranges admit, "" if unknown."""

    name: str
    local: bool  # in kube-proxy's sense: a socket, or a pod's packet
    packet: bool
    address: str = ""  # of packets

    def may_use(self, admits: frozenset[str] | None) -> bool:
        """Whether source ranges that admit these clients (None: all) admit this client."""
        return admits is None or self.name in admits


POD_SOCKET = Asking("", local=True, packet=False)
HOST_SOCKET = Asking("node", local=True, packet=False)
SENDERS = (
    Asking("inside", local=False, packet=True, address="203.0.113.7"),
    Asking("outside", local=False, packet=True, address="198.18.0.9"),
    Asking("pod", local=True, packet=True, address="10.1.9.9"),
)


def of_family(address: str, version: int) -> str:
    """Return the address of this family that stands for an IPv4 address."""
    if version == 4:
        return address
    return str(ip_address((0xFD00 << 112) | int(IPv4Address(address))))


def network_of_family(network: str, version: int) -> str:
    if version == 4:
        return network
    address, length = network.split("/")
    return f"{of_family(address, 6)}/{int(length) + 96}"


def is_here(number: int) -> bool:
    """Whether endpoints with this address are on this node."""
    return number in (1, 3)


def cluster_ip(ip: int, version: int) -> str:
    return of_family(f"10.96.0.{ip + 1}", version)


def balanced_ip(ip: int, version: int) -> str:
    return of_family(f"198.51.100.{ip + 1}", version)


def external_ip(ip: int, version: int) -> str:
    return of_family(f"198.51.100.{ip + 101}", version)


def node_port(ip: int, port: str) -> int:
    """Return the NodePort of the Service with this address; both are unique."""
    return 30000 + 10 * ip + list(PORTS).index(port)


def _places() -> list[Where]:
    found = [
        (cluster_ip(ip, version), *PORTS[port])
        for version in FAMILIES
        for ip in range(IPS)
        for port in PORTS
    ]
    for version in FAMILIES:
        for ip in range(IPS):
            for port in EXTERNAL_PORTS:
                number, protocol = PORTS[port]
                at_node = of_family(NODE_ADDRESS, version)
                found.append((balanced_ip(ip, version), number, protocol))
                found.append((at_node, node_port(ip, port), protocol))
            found.append((external_ip(ip, version), *PORTS["web"]))
    return found


FRONTENDS: list[Where] = _places()
CLUSTER_IPS = {cluster_ip(ip, version) for ip in range(IPS) for version in FAMILIES}
BY_PODS_ALONE = {at for at in FRONTENDS if at[0] in CLUSTER_IPS and at[1:] == PORTS["alt"]}
AT_LOOPBACK = [(LOOPBACK, *where[1:]) for where in FRONTENDS if where[0] == NODE_ADDRESS]


@cache
def version_of(address: str) -> int:
    return ip_address(address).version


@cache
def number_of(address: str) -> int:
    """Return the last 32 bits, as in a hook's context."""
    return int.from_bytes(ip_address(address).packed[-4:], "little")


@cache
def packed(place: Place) -> int:
    """Return a backend as an outcome."""
    is_v6 = version_of(place[0]) == 6
    return is_v6 << 48 | number_of(place[0]) << 16 | htons(place[1])


def outcome(verdict: str) -> int:
    """Return a verdict as an outcome."""
    return next(-1 - number for number, word in VERDICTS.items() if word == verdict)


def spelled(outcome: int) -> str:
    """Return the outcome as text."""
    if outcome < 0:
        return VERDICTS[-1 - outcome]
    number, port = outcome >> 16 & 0xFFFFFFFF, htons(outcome & 0xFFFF)
    address = ".".join(map(str, number.to_bytes(4, "little")))
    begins = {0: "", 1: "fd00::"}.get(outcome >> 48, "elsewhere, ")
    return f"{begins}{address}:{port}"
