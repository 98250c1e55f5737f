# SPDX-License-Identifier: Apache-2.0
"""The ports of connections that the kernel masquerades are kept from the flow tables."""

import os
import socket
from collections.abc import Iterator, Mapping
from ipaddress import ip_address

import pytest

from ebpflb.entries.flows import Flow, FlowKind, Hook, Tuple
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter import held_ports
from ebpflb.model.services import Protocol
from tests.kernel.maps.small import small_maps
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run

NAME = f"ebpflb-test-{os.getpid()}-held"
NODE, BACKEND = map(ip_address, ("127.0.0.9", "127.0.0.1"))
RULES = """
table inet mine {
  chain to { type nat hook output priority -100; udp dport 53 dnat ip to 127.0.0.1:5454; }
  chain from {
    type nat hook postrouting priority 100
    udp sport 4001 snat ip to 127.0.0.9:20001
    udp sport 4002 snat ip to 127.0.0.9:40001
  }
}
"""
HELD = Tuple(BACKEND, NODE, 5454, 20001, Protocol.UDP, Hook.INGRESS)


@pytest.fixture
def maps() -> Iterator[Mapping[str, Map]]:
    """Return maps, in a namespace with datagrams: masqueraded with a port of the flow tables and
    with another, translated only, masqueraded only.
    """
    with small_maps(("tcp_flows", "other_flows")) as made, nodes.fresh(NAME):
        run("ip", "link", "set", "lo", "up")
        run("nft", "-f", "-", said=RULES)
        for source, port in ((4001, 53), (4002, 53), (20002, 53), (4001, 54)):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.bind(("", source))
                client.sendto(b"?", ("127.0.0.7", port))
        held_ports.hold(made, 20000, 29999)
        yield made


def test_ports_in_use_are_held(maps: Mapping[str, Map]) -> None:
    """Those that flows could get; this is no flow, and ends with them."""
    assert [key for key, _ in maps["other_flows"].items()] == [HELD]
    assert not held_ports.has_flows(maps)
    held_ports.let_go(maps)
    assert not [*maps["other_flows"].items()]


def test_a_flow_keeps_its_port(maps: Mapping[str, Map]) -> None:
    """Its entry is not replaced, and stays when others are let go."""
    flow = Flow(1, 0, NODE, 80, 0, 1, 1, 0, FlowKind.UN_SNAT, frozenset())
    maps["other_flows"].write([(HELD, flow)])
    held_ports.hold(maps, 20000, 29999)
    held_ports.let_go(maps)
    assert [*maps["other_flows"].items()] == [(HELD, flow)]
    assert held_ports.has_flows(maps)
