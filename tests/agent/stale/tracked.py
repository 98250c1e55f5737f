# SPDX-License-Identifier: Apache-2.0
"""Entries of conntrack, as clients and other programs' rules make them."""

import socket
from ipaddress import ip_address

from ebpflb.entries.flows import Connection
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model.services import Protocol
from tests.agent.stale.world import ELSEWHERE
from tests.kernel.node.nodes import run

SERVING, REMOVED = f"{ELSEWHERE.address}:{ELSEWHERE.port}", "10.244.8.8:5353"
GONE = (ip_address("10.244.8.8"), 5353)


def tracked(
    address: str, port: int, to: str = "", *, protocol: Protocol = Protocol.UDP, source: int = 0
) -> None:
    """Make an entry of a client that has sent to this address, translated to ``to``, or not at
    all.
    """
    v6, datagrams = ":" in address, protocol is Protocol.UDP
    family, where = ("ip6" if v6 else "ip"), f"{protocol.name.lower()} dport {port}"
    verdict = f"dnat {family} to {to}" if to else "ct state new accept"
    chain = "type nat hook output priority -100"
    rule = f"{family} daddr {address} {where} {verdict}"
    run("nft", "-f", "-", said=f"table inet t {{\n chain c {{\n {chain}\n {rule}\n }}\n}}\n")
    kind = socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, kind) as client:
        client.bind(("", source))
        client.setblocking(False)
        client.connect_ex((address, port))
        if datagrams:
            client.send(b"?")
    run("nft", "delete", "table", "inet", "t")
    assert any(each.original.destination_port == port for each in entries())


def entries() -> list[Connection]:
    return list(conntrack.connections(lambda *_: True))
