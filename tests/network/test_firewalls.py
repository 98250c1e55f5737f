# SPDX-License-Identifier: Apache-2.0
"""Counters at netfilter's hooks agree with docs/firewalls.md about what each hook sees."""

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpflb.lab import cni
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import both_engines, families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

PAGE = Path(__file__).parents[2] / "docs" / "firewalls.md"
WEB, FAR = Frontends(10), Frontends(20)
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
# Where conntrack knows both directions: before NAT the first packet has no masquerade yet.
BEHIND_NAT = "type filter hook postrouting priority 200"


def said(section: str, column: str) -> dict[str, str]:
    """Return the column of the table below a heading of the page, by hook."""
    lines = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    shown = [(row[0].split(", "), row[rows[0].index(column)]) for row in rows[2:]]
    return {hook: addresses for hooks, addresses in shown for hook in hooks}


pytestmark = both_engines


@pytest.fixture(scope="module", autouse=True)
def services(two: TwoNodes) -> None:
    two.publish(
        two.service("web", 10, two.here, externalTrafficPolicy="Local"),
        two.service("far", 20, two.there),
    )


class Way(NamedTuple):
    """One request: its client and endpoint, the requested frontend, and the protocol."""

    client: str
    endpoint: str
    service: tuple[str, int]
    send: Send
    node: str  # the address that it is masqueraded with

    def directions(self) -> dict[str, str]:
        """Return the conditions of rules for each direction; conditions of conntrack begin with
        "ct".
        """
        ip = "ip6" if ":" in self.client else "ip"
        protocol = "tcp" if self.send is requests.tcp else "udp"
        to = {"service": self.service, "endpoint": (self.endpoint, TARGET)}
        found = {}
        for name, (host, port) in to.items():
            for whom, address in (("client", self.client), ("node", self.node)):
                reply = f"{ip} saddr {host} {protocol} sport {port} {ip} daddr {address}"
                asked = f"ct reply {ip} saddr {host} ct reply {ip} daddr {address}"
                found[f"{name} > {whom}"] = reply
                found[f"ct reply: {name} > {whom}"] = asked
            request = f"{ip} saddr {self.client} {ip} daddr {host} {protocol} dport {port}"
            found[f"client > {name}"] = request
            original = f"ct original {ip} saddr {self.client} ct original {ip} daddr {host}"
            found[f"ct original: client > {name}"] = original
        return found


def rules(way: Way) -> str:
    """Return a table that counts each direction at each hook, and conntrack's view after all
    NAT.
    """
    text = "table inet lab_seen {\n"
    for number, (hook, type_) in enumerate([*HOOKS.items(), ("", BEHIND_NAT)]):
        text += f"chain c{number} {{ {type_};\n"
        text += "".join(
            f'{match} counter comment "{hook}|{name}"\n'
            for name, match in way.directions().items()
            if name.startswith("ct ") == (type_ == BEHIND_NAT)
        )
        text += "}\n"
    return text + "}\n"


def seen(two: TwoNodes, way: Way, who: Host, name: str) -> dict[str, set[str]]:
    """Send one request; return what the counters at each hook, and conntrack, saw of it and its
    reply.
    """
    two.near.nft(rules(way))
    try:
        assert way.send(two.sockets(who), *way.service).name == name
        command = [*two.near.enter, "nft", "-j", "list", "table", "inet", "lab_seen"]
        listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    finally:
        two.near.nft("delete table inet lab_seen")
    found: dict[str, set[str]] = {}
    for rule in (each["rule"] for each in listed["nftables"] if "rule" in each):
        hook, _, direction = rule["comment"].partition("|")
        (counter,) = (e["counter"] for e in rule["expr"] if "counter" in e)
        if counter["packets"]:
            of_conntrack, _, tuple_ = direction.rpartition(": ")
            found.setdefault(of_conntrack or hook, set()).add(tuple_)
    return found


def expected(requests_of: str, replies_of: str) -> dict[str, set[str]]:
    """Return a column of each of the page's two tables, in the form of ``seen``."""
    found: dict[str, set[str]] = {}
    for section, column in (("Requests", requests_of), ("Replies", replies_of)):
        for hook, way in said(section, column).items():
            if way != "-":
                found.setdefault(hook, set()).add(way)
    return found


def way_in(two: TwoNodes, frontends: Frontends, endpoint: Host, send: Send, v6: bool) -> Way:
    """Return the path from outside to a NodePort of the near node."""
    client, to, node = (it.v6 if v6 else it.v4 for it in (two.outside, endpoint, two.near))
    return Way(client, to, frontends.to("nodeport", two.near, v6=v6), send, node)


@pytest.mark.extended
@families
@protocols
def test_packets_at_each_hook(two: TwoNodes, send: Send, v6: bool) -> None:
    """A client outside sends to a NodePort whose endpoint is on this node."""
    way = way_in(two, WEB, two.here, send, v6)
    found = seen(two, way, two.outside, "here")
    assert found == expected(two.engine, two.engine)


@families
@protocols
def test_masqueraded_packets_at_each_hook(two: TwoNodes, send: Send, v6: bool) -> None:
    """The endpoint is on another node, so the request is masqueraded."""
    way = way_in(two, FAR, two.there, send, v6)
    found = seen(two, way, two.outside, "there")
    replies = "netfilter, masqueraded" if two.engine is Engine.NETFILTER else two.engine
    assert found == expected(two.engine, replies)


@families
@protocols
def test_sockets_at_each_hook(two: TwoNodes, send: Send, v6: bool) -> None:
    """A process of the node connects to a cluster IP, with either engine."""
    node = cni.addresses(1, 1)[v6]  # the address from which the node reaches its pods
    to, near = (it.v6 if v6 else it.v4 for it in (two.here, two.near))
    way = Way(node, to, WEB.to("cluster", two.near, v6=v6), send, near)
    assert seen(two, way, two.near, "here") == expected("socket", "socket")
