# SPDX-License-Identifier: Apache-2.0
"""Flows in conntrack, joined with services and backends: listed and deleted.

In a namespace of the test's own, a rule of nft makes the entries as kube-proxy's rules would.
"""

import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.entries.services import Backend, BackendName, Frontend, Range, ServiceEntry
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.serve.metrics import Reading
from ebpflb.tools.flow_list import FlowFilter, FlushResult, flush_connections, list_connections
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run
from tests.serve.subjects import sources

NAME = f"ebpflb-test-{os.getpid()}-joined"
ALL = FlowFilter()
DNS, WEB = 7, 8
VIP, VIP6, NODE = map(ip_address, ("127.0.0.10", "fd00:96::10", "127.0.0.77"))
UDP = Frontend(VIP, 53, Protocol.UDP)
UDP6 = Frontend(VIP6, 53, Protocol.UDP)
TCP = Frontend(ip_address("0.0.0.0"), 30080, Protocol.TCP)
BACKEND, BACKEND6 = ip_address("127.0.0.1"), ip_address("::1")
RULES = """
table inet mine {
  chain c {
    type nat hook output priority -100
    ip daddr 127.0.0.10 udp dport 53 dnat ip to 127.0.0.1:5353
    ip daddr 127.0.0.10 udp dport 54 dnat ip to 127.0.0.1:5353
    ip6 daddr fd00:96::10 udp dport 53 dnat ip6 to [::1]:5353
    ip daddr 127.0.0.77 tcp dport 30080 dnat ip to 127.0.0.1:8080
    ip daddr 127.0.0.78 tcp dport 30080 dnat ip to 127.0.0.1:8080
  }
  chain s {
    type nat hook postrouting priority 100
    ip daddr 127.0.0.1 udp sport 4002 snat ip to 127.0.0.99:6002
  }
}
"""


@pytest.fixture(scope="module", autouse=True)
def filled(maps: dict[str, Map]) -> None:
    """Fill maps with a UDP service in both families, and a TCP service with a NodePort."""
    services = (((UDP, UDP6), DNS, Range(0, 2)), ((TCP,), WEB, Range(2, 1)))
    for frontends, number, block in services:
        for at in frontends:
            entry = ServiceEntry(number, frozenset(), 0, block.size, block, block)
            maps["services"].write([(at, entry)])
    flags = frozenset({"cluster"})
    ends = ((BACKEND, 5353, DNS), (BACKEND6, 5353, DNS), (BACKEND, 8080, WEB))
    for slot, (address, port, service) in enumerate(ends):
        maps["slots"].write([(slot, Backend(address, port, flags, 20 + slot, service))])
        maps["backend_names"].write([(20 + slot, BackendName("node-1", f"pod-{slot}"))])
    dns = PortName("shop", "dns", "dns", Protocol.UDP, Family.IPV4)
    web = PortName("shop", "web", "http", Protocol.TCP, Family.IPV4)
    maps["service_names"].write([(DNS, dns), (WEB, web)])
    maps["node_addresses"].write([(NODE, 1)])


@pytest.fixture(autouse=True)
def netns() -> Iterator[None]:
    with nodes.fresh(NAME):
        run("ip", "link", "set", "lo", "up")
        run("ip", "address", "add", f"{VIP6}/128", "dev", "lo", "nodad")
        run("nft", "-f", "-", said=RULES)
        yield


def say(address: object, port: int, source: int) -> None:
    family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.bind(("", source))
        client.sendto(b"?", (str(address), port))


def rows(maps: dict[str, Map], only: FlowFilter = ALL) -> list[dict[str, Any]]:
    return sorted(list_connections(maps, only), key=lambda row: str(row["client"]))


def test_a_flow(maps: dict[str, Map]) -> None:
    """One row has the columns of the flow tables, with names."""
    say(VIP, 53, 4001)
    (row,) = rows(maps)
    assert row == {
        "protocol": "UDP",
        "state": "one-way",
        "service": "shop/dns:dns/UDP",
        "client": "127.0.0.1:4001",
        "frontend": "127.0.0.10:53",
        "backend": "127.0.0.1:5353",
        "pod": "pod-0",
        "node": "node-1",
        "masqueraded_as": "",
        "reply": "127.0.0.1:5353 > 127.0.0.1:4001",
        "age_seconds": None,
        "idle_seconds": None,
        "engine": "netfilter",
    }


@pytest.mark.parametrize(
    ("only", "count"),
    [
        (ALL, 2),
        (FlowFilter(("shop", "dns")), 2),
        (FlowFilter(("shop", "web")), 0),
        (FlowFilter(client=ip_address("127.0.0.1")), 1),
        (FlowFilter(client=ip_address("127.0.0.2")), 0),
    ],
    ids=str,
)
def test_only_matching_flows_are_shown(maps: dict[str, Map], only: FlowFilter, count: int) -> None:
    """Only matching flows are shown and deleted; all other flows stay."""
    say(VIP, 53, 4001)
    say(VIP6, 53, 4001)
    say(VIP, 54, 4001)
    assert len(rows(maps, only)) == count
    assert flush_connections(maps, only) == FlushResult(count, count)
    assert len(rows(maps)) == 2 - count
    assert conntrack.count() == 3 - count


def test_fill_is_shown_before_flows_are_counted(maps: dict[str, Map]) -> None:
    """conntrack's fill is shown at once, and its flows after they have been counted."""
    say(VIP, 53, 4001)
    say(VIP, 54, 4001)
    assert Reading(sources(maps)).groups()["conntrack"]() == {
        "ebpflb_conntrack_entries": 2,
        "ebpflb_conntrack_max_entries": conntrack.limit(),
    }
