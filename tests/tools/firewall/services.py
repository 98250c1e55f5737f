# SPDX-License-Identifier: Apache-2.0
"""The node and the Services that the rules of these tests are compared with, and recorded rules."""

import json
import re
from collections.abc import Iterable
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from ebpflb.kernel.netfilter.firewall_reader import read_iptables, read_nft
from ebpflb.kernel.netfilter.firewall_rules import Table
from ebpflb.model.addresses import number
from ebpflb.model.kube_proxy import parse_rules
from ebpflb.model.packet_path import Engine
from ebpflb.plan.entries import Flags
from ebpflb.tools.firewall.survey import Frontend, Search, is_early

RECORDED = Path(__file__).parent / "recorded"
NODE = {4: number(ip_address("192.0.2.1")), 6: number(ip_address("fd02::1"))}
WEB, WEB6, DNS = ("10.244.1.11", 8080), ("fd00:244:1::11", 8080), ("10.244.1.12", 53)
SETTINGS: dict[Engine, Flags] = {
    Engine.FLOWS: frozenset(),
    Engine.NETFILTER: frozenset({"netfilter"}),
}
FLOWS, NETFILTER = SETTINGS.values()


def frontend(
    kind: str,
    address: str,
    port: int,
    to: tuple[str, int],
    protocol: int = 6,
    *,
    settings: Flags = FLOWS,
    service: Flags = frozenset(),
) -> Frontend:
    """``address`` is "" for a NodePort, which gets the family of its endpoint."""
    endpoint = ip_address(to[0])
    where = number(ip_address(address)) if address else NODE[endpoint.version]
    return Frontend(
        protocol,
        (where,),
        port,
        f"{address} {port}".strip(),
        (number(endpoint), to[1]),
        is_nodeport=not address,
        is_early=is_early(kind, protocol, service, settings),
    )


def services(settings: Flags, service: Flags = frozenset()) -> list[Frontend]:
    add = partial(frontend, settings=settings, service=service)
    return [
        add("NodePort", "", 30080, WEB),
        add("NodePort", "", 30080, WEB6),
        add("ClusterIP", "10.96.0.10", 80, WEB),
        add("ClusterIP", "fd00:96::10", 80, WEB6),
        add("LoadBalancer", "203.0.113.10", 80, WEB),
        add("ClusterIP", "10.96.0.10", 53, DNS, 17),
    ]


def search(tables: Iterable[Table], served: Iterable[Frontend]) -> list[str]:
    """What is named of these tables, all rules of which can be read."""
    made = Search(served)
    found = [line for table in tables for line in made.named(table)]
    assert not made.unread
    return found


def where(line: str) -> tuple[str, str]:
    """The chain and the rule of such a line."""
    place, _, rest = line.partition(", chain ")[2].partition(": ")
    return place.partition(" ")[0], re.split(": (?:may not match|does not exempt) ", rest)[0]


def of_iptables(saved: str, tool: str = "iptables-nft") -> list[Table]:
    return [read_iptables(table, tool) for table in parse_rules(saved)]


def recorded(tool: str) -> list[Table]:
    """What the tool printed of the rules beside this file, as nft prints them table by table."""
    if tool != "nft":
        return of_iptables((RECORDED / f"{tool}.save").read_text(), tool)
    objects = json.loads((RECORDED / "nft.json").read_text())["nftables"]
    by_table: dict[str, list[object]] = {}
    for each in objects:
        for kind, value in each.items():
            name = value.get("name" if kind == "table" else "table", "")
            by_table.setdefault(name, []).append(each)
    return [read_nft(json.dumps({"nftables": by_table[it]})) for it in ("fw", "port")]
