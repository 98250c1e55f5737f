# SPDX-License-Identifier: Apache-2.0
"""The node, Services and recorded rules for these tests."""

import json
from collections.abc import Iterable
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from ebpflb.kernel.netfilter.firewall import Table, read_iptables, read_nft
from ebpflb.model.kube_proxy import parse_rules
from ebpflb.tools.firewall import Frontend, Search, Way

RECORDED = Path(__file__).parent / "recorded"
NODE, NODE6 = "192.0.2.1", "fd02::1"
WEB, WEB6, DNS = ("10.244.1.11", 8080), ("fd00:244:1::11", 8080), ("10.244.1.12", 53)


def frontend(
    kind: str,
    address: str,
    port: int,
    to: tuple[str, int],
    protocol: int = 6,
    *,
    early: bool = False,
) -> Frontend:
    """Return a frontend; ``early``: the flow tables translate; ``kind`` is its title."""
    endpoint = ip_address(to[0]), to[1]
    return Frontend(protocol, ip_address(address), port, kind, endpoint, early)


def services(*, early: bool = False) -> list[Frontend]:
    add = partial(frontend, early=early)
    return [
        add("NodePort 30080 (shop/web)", NODE, 30080, WEB),
        add("NodePort 30080 (shop/web)", NODE6, 30080, WEB6),
        add("203.0.113.10:80 (shop/web)", "203.0.113.10", 80, WEB),
        add("203.0.113.10:53 (shop/dns)", "203.0.113.10", 53, DNS, 17),
    ]


WAYS = {
    4: Way("eth0", frozenset({ip_address(NODE)}), frozenset({ip_address("10.244.1.1")})),
    6: Way("eth0", frozenset({ip_address(NODE6)}), frozenset()),
}


def search(tables: Iterable[Table], served: Iterable[Frontend]) -> list[str]:
    """Return the rules that are named in these tables, all of whose rules can be read."""
    made = Search(served, WAYS)
    found = [line for table in tables for line in made.named(table)]
    assert not made.unread
    return found


def where(line: str) -> tuple[str, str]:
    """Return the chain and the rule in such a line."""
    place, _, rest = line.partition(", chain ")[2].partition(": ")
    return place, rest.partition(": drops requests to ")[0]


def of_iptables(saved: str, tool: str = "iptables-nft") -> list[Table]:
    return [read_iptables(table, tool) for table in parse_rules(saved)]


def recorded(tool: str) -> list[Table]:
    """Return the tool's output beside this file, table by table as nft prints rules."""
    if tool != "nft":
        return of_iptables((RECORDED / f"{tool}.save").read_text(), tool)
    objects = json.loads((RECORDED / "nft.json").read_text())["nftables"]
    by_table: dict[str, list[object]] = {}
    for each in objects:
        for kind, value in each.items():
            name = value.get("name" if kind == "table" else "table", "")
            by_table.setdefault(name, []).append(each)
    return [read_nft(json.dumps({"nftables": by_table[it]})) for it in ("fw", "port")]
