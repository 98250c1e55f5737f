# SPDX-License-Identifier: Apache-2.0
"""Virtual servers of IPVS, and which of them are kube-proxy's (kube-proxy.md 17)."""

from collections.abc import Mapping, Set
from ipaddress import IPv4Address, ip_address
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.services import PROTOCOLS

_HEX = 16


class VirtualServer(NamedTuple):
    """Where IPVS listens; ``protocol`` is TCP, UDP or SCTP."""

    protocol: str
    address: Address
    port: int
    open_connections: int = 0

    def __str__(self) -> str:
        address = f"[{self.address}]" if self.address.version == 6 else self.address
        return f"{address}:{self.port}/{self.protocol}"


def parse(table: str) -> list[VirtualServer]:
    """The text of /proc/net/ip_vs. Servers for a firewall mark (FWM) are left out.

    After a server's line come those of its destinations, with the open connections of each in the
    last column but one.
    """
    found: list[VirtualServer] = []
    listed = False
    for words in filter(None, map(str.split, table.splitlines())):
        if words[0] in PROTOCOLS:
            found.append(_server(*words[:2]))
        if words[0] == "->" and listed:
            found[-1] = found[-1]._replace(
                open_connections=found[-1].open_connections + int(words[-2])
            )
        listed = words[0] in PROTOCOLS or (listed and words[0] == "->")
    return found


def _server(protocol: str, where: str) -> VirtualServer:
    host, _, port = where.rpartition(":")
    address = ip_address(host[1:-1]) if host.startswith("[") else IPv4Address(int(host, _HEX))
    return VirtualServer(protocol, address, int(port, _HEX))


def split(
    servers: list[VirtualServer], device: Set[Address], node_ports: Mapping[str, Set[int]]
) -> tuple[list[VirtualServer], list[VirtualServer]]:
    """The servers of kube-proxy, and the others.

    kube-proxy's have an address of its ``device``, or a port that is in its ipsets of NodePorts
    (``node_ports``: protocol -> ports). Its own cleanup removes all servers; this one does not.
    """
    ours = [
        server
        for server in servers
        if server.address in device or server.port in node_ports.get(server.protocol, ())
    ]
    return ours, [server for server in servers if server not in ours]
