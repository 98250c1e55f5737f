# SPDX-License-Identifier: Apache-2.0
"""The node and the Services that the rules of these tests are compared with."""

from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path

from ebpflb.model.packet_path import Engine
from ebpflb.tools.firewall.named import Frontend, Frontends, Named, Search, Settings
from ebpflb.tools.firewall.rules import Table, number

RECORDED = Path(__file__).parent / "recorded"
NODE = {4: number(ip_address("192.0.2.1")), 6: number(ip_address("fd02::1"))}
WEB, WEB6, DNS = ("10.244.1.11", 8080), ("fd00:244:1::11", 8080), ("10.244.1.12", 53)


def frontend(
    kind: str, address: str, port: int, to: tuple[str, int], protocol: int = 6
) -> Frontend:
    """``address`` is "" for a NodePort, which gets the family of its endpoint."""
    endpoint = ip_address(to[0])
    family = endpoint.version
    where = number(ip_address(address)) if address else NODE[family]
    title = f"{address} {port}".strip()
    return Frontend(kind, protocol, family, (where,), port, title, ((number(endpoint), to[1]),))


SERVICES = [
    frontend("NodePort", "", 30080, WEB),
    frontend("NodePort", "", 30080, WEB6),
    frontend("ClusterIP", "10.96.0.10", 80, WEB),
    frontend("ClusterIP", "fd00:96::10", 80, WEB6),
    frontend("LoadBalancer", "203.0.113.10", 80, WEB),
    frontend("ClusterIP", "10.96.0.10", 53, DNS, 17),
]


def node(engine: Engine, *, host_sockets: bool = False) -> Settings:
    return Settings(engine, host_sockets)


def search(
    tables: Iterable[Table], at: Settings, *, services: Iterable[Frontend] = SERVICES
) -> list[Named]:
    """What is named of these tables, all rules of which can be read."""
    made = Search(Frontends(services), at)
    found = [each for table in tables for each in made.named(table)]
    assert not made.unread
    return found


def chain(found: Named) -> str:
    return found.where.partition(", chain ")[2].partition(" ")[0]
