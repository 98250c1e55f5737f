# SPDX-License-Identifier: Apache-2.0
"""docs/firewalls.md says what netfilter sees at each hook: counters at the hooks say the same."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import TARGET
from tests.kit.two_nodes import CLUSTER_CIDR, Frontends, TwoNodes

PAGE = Path(__file__).parents[2] / "docs" / "firewalls.md"
WEB = Frontends(10)
HOOKS = {
    "raw PREROUTING": "type filter hook prerouting priority -290",
    "mangle PREROUTING": "type filter hook prerouting priority -150",
    "after nat PREROUTING": "type filter hook prerouting priority -90",
    "INPUT": "type filter hook input priority 0",
    "FORWARD": "type filter hook forward priority 0",
    "raw OUTPUT": "type filter hook output priority -290",
    "filter OUTPUT": "type filter hook output priority 0",
    "mangle POSTROUTING": "type filter hook postrouting priority -150",
}


def said(section: str, column: str) -> dict[str, str]:
    """The column of the table below a heading of the page, by hook."""
    lines = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {row[0]: row[rows[0].index(column)] for row in rows[2:]}


@pytest.fixture(scope="module", params=["flows", "conntrack"])
def two(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TwoNodes]:
    folder = tmp_path_factory.mktemp("two")
    options = (*CLUSTER_CIDR, "--packet-path", request.param)
    with two_nodes.running(folder, *options) as made:
        made.publish(made.service("web", 10, made.here, externalTrafficPolicy="Local"))
        yield made


def seen(two: TwoNodes, client: str, service: tuple[str, int], who: str) -> dict[str, set[str]]:
    """What counters at the hooks saw of one connection, by hook and "ct original"."""
    endpoint = two.here.v4
    directions = {
        "client > service": f"ip saddr {client} ip daddr {service[0]} tcp dport {service[1]}",
        "client > endpoint": f"ip saddr {client} ip daddr {endpoint} tcp dport {TARGET}",
        "service > client": f"ip saddr {service[0]} tcp sport {service[1]} ip daddr {client}",
        "endpoint > client": f"ip saddr {endpoint} tcp sport {TARGET} ip daddr {client}",
        "ct: client > service": f"ct original ip daddr {service[0]} ct direction original",
        "ct: client > endpoint": f"ct original ip daddr {endpoint} ct direction original",
    }
    rules = "table inet lab_seen {\n"
    for number, hook in enumerate(HOOKS):
        rules += f"chain c{number} {{ {HOOKS[hook]};\n"
        rules += "".join(
            f'{match} counter comment "{hook}|{way}"\n'
            for way, match in directions.items()
            if not way.startswith("ct:") or hook == "mangle POSTROUTING"
        )
        rules += "}\n"
    two.near.nft(rules + "}\n")
    try:
        assert requests.tcp(two.sockets(getattr(two, who)), *service).name == "here"
        command = [*two.near.enter, "nft", "-j", "list", "table", "inet", "lab_seen"]
        listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    finally:
        two.near.nft("delete table inet lab_seen")
    found: dict[str, set[str]] = {}
    for rule in (each["rule"] for each in listed["nftables"] if "rule" in each):
        hook, _, way = rule["comment"].partition("|")
        (counter,) = (e["counter"] for e in rule["expr"] if "counter" in e)
        if counter["packets"]:
            where = "ct original" if way.startswith("ct: ") else hook
            found.setdefault(where, set()).add(way.removeprefix("ct: "))
    return found


def expected(column: str) -> dict[str, set[str]]:
    """The page's two tables of a column, as ``seen`` gives it."""
    found: dict[str, set[str]] = {}
    for section in ("Requests", "Replies"):
        for hook, way in said(section, column).items():
            if way != "-":
                found.setdefault(hook, set()).add(way)
    return found


def test_packets_at_each_hook(two: TwoNodes) -> None:
    """A client outside that sends to a NodePort, whose endpoint is on this node."""
    engine = two.agents[0].options[-1]
    found = seen(two, two.outside.v4, WEB.to("nodeport", two.near), "outside")
    assert found == expected(engine)


def test_sockets_at_each_hook(two: TwoNodes) -> None:
    """A process of the node that connects to a cluster IP, with either engine."""
    node = "10.244.1.1"  # the address from which the node reaches its pods
    found = seen(two, node, WEB.to("cluster", two.near), "near")
    assert found == expected("socket")
