# SPDX-License-Identifier: Apache-2.0
"""The node and the services that the rules in ``recorded`` are compared with."""

from ipaddress import ip_address
from pathlib import Path

from ebpflb.diagnose.firewall.matches import NO_ADDRESS_OR_PORT, number
from ebpflb.diagnose.firewall.rule_search import Finding, RuleSearch
from ebpflb.diagnose.firewall.rules import FirewallTable
from ebpflb.diagnose.firewall.service_traffic import (
    FrontendKind,
    NodeState,
    Traffic,
    TrafficEndpoint,
    TrafficFrontend,
    by_family,
)
from ebpflb.model.packet_mark import OFF, PacketMark
from ebpflb.model.packet_path import Engine

RECORDED = Path(__file__).parent / "recorded"
NODE = [ip_address("192.0.2.1"), ip_address("fd02::1")]
AWS = 0x80  # a routing rule has this mark
WEB, WEB6, DNS = ("10.244.1.11", 8080), ("fd00:244:1::11", 8080), ("10.244.1.12", 53)


def frontend(
    kind: str, address: str, port: int, to: tuple[str, int], protocol: int = 6
) -> TrafficFrontend:
    """``address`` is "" for a NodePort, which gets the family of its endpoint."""
    endpoint = ip_address(to[0])
    where = number(ip_address(address)) if address else NO_ADDRESS_OR_PORT
    title = f"{address} {port}".strip()
    to_all = (TrafficEndpoint(number(endpoint), to[1]),)
    return TrafficFrontend(
        FrontendKind(kind), where, port, protocol, endpoint.version, title, to_all
    )


SERVICES = [
    frontend("NodePort", "", 30080, WEB),
    frontend("NodePort", "", 30080, WEB6),
    frontend("ClusterIP", "10.96.0.10", 80, WEB),
    frontend("ClusterIP", "fd00:96::10", 80, WEB6),
    frontend("LoadBalancer", "203.0.113.10", 80, WEB),
    frontend("ClusterIP", "10.96.0.10", 53, DNS, 17),
]


def node(engine: Engine, *, host_sockets: bool = False, mark: PacketMark = OFF) -> NodeState:
    own = frozenset(map(number, [*NODE, ip_address("127.0.0.1")]))
    return NodeState(engine, own, by_family(NODE), host_sockets, mark, {AWS})


def search(tables: list[FirewallTable], at: NodeState, *, in_pod: bool = False) -> list[Finding]:
    """What is found in these tables."""
    found = RuleSearch(Traffic(SERVICES, at), at, in_pod=in_pod)
    found.add(tables)
    assert found.complete
    return found.findings
