# SPDX-License-Identifier: Apache-2.0
"""What the conntrack engine cannot do, as docs/limits.md has it: so that the page stays true."""

import struct
import subprocess
from contextlib import suppress
from socket import AF_NETLINK, SOCK_RAW, socket

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import CALL_SECONDS
from ebpflb.model.packet_path import Engine
from ebpflb.node import ctnetlink
from tests.kit import requests
from tests.kit.firewall import chain, rules
from tests.kit.lab_cluster import TARGET
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes
from tests.network.test_packets_table import families, protocols
from tests.node import nodes

FRONTENDS = Frontends(10)
NETLINK_NETFILTER = 12
NEW_UPDATE_DESTROY = (
    0b111  # conntrack's multicast groups: 1, 2 and 3 (linux/netfilter/nfnetlink_compat.h)
)
A_MOMENT = 0.5  # seconds in which nothing may happen

pytestmark = pytest.mark.parametrize("two", [Engine.CONNTRACK], indirect=True)


@pytest.fixture(autouse=True)
def service(two: TwoNodes) -> None:
    two.publish(two.service("web", 10, two.here))


def lines(node: Host, port: int) -> list[str]:
    """Of the entries of flows to this port, as the kernel shows them."""
    words = [*node.enter, "cat", "/proc/net/nf_conntrack"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [
        line
        for line in text.splitlines()
        if f"dport={port} " in line.partition("src=")[2].partition("src=")[0]
    ]


def is_served(two: TwoNodes, send: Send, seconds: float = CALL_SECONDS, *, v6: bool) -> bool:
    """Whether an answer comes in so many seconds."""
    where = FRONTENDS.to("nodeport", two.near, v6=v6)
    try:
        return requests.is_answered(send, two.sockets(two.outside), where, seconds)
    except OSError:
        return False


@pytest.mark.extended
@families
def test_connections_break_when_their_entries_are_deleted(two: TwoNodes, v6: bool) -> None:
    """UDP goes on with its next datagram."""
    client, where = two.sockets(two.outside), FRONTENDS.to("nodeport", two.near, v6=v6)
    stream, datagrams = (
        make(client, where[0]) for make in (requests.tcp_socket, requests.udp_socket)
    )
    with stream, datagrams:
        for each in (stream, datagrams):
            each.connect(where)
            each.send(b"?")
            assert each.recv(64)
        with nodes.entered(two.near.netns):
            ctnetlink.delete(ctnetlink.connections(lambda *_: True))
        datagrams.send(b"?")
        assert datagrams.recv(64)
        stream.settimeout(A_MOMENT)
        with pytest.raises(OSError, match=r"reset|timed out|refused"):
            for _ in range(3):
                stream.recv(64)
                stream.send(b"still there?")


@families
@protocols
def test_a_zone_that_raw_sets_is_not_known(two: TwoNodes, v6: bool, send: Send) -> None:
    """The entry is in zone 0, where the packet is not looked up: it is not translated."""
    zone = f"meta l4proto {{ tcp, udp }} th dport {FRONTENDS.nodeport} ct zone set 5"
    with rules(two.near, chain("prerouting", "raw", zone)):
        assert not is_served(two, send, A_MOMENT, v6=v6)
    assert is_served(two, send, v6=v6)


def ask_endpoint(two: TwoNodes, send: Send, *, v6: bool) -> None:
    """A flow of the node itself, whose entry the kernel makes."""
    send(two.sockets(two.near), two.here.v6 if v6 else two.here.v4, TARGET)


@families
@protocols
def test_no_packets_and_times_are_kept(two: TwoNodes, v6: bool, send: Send) -> None:
    """nf_conntrack_acct and nf_conntrack_timestamp are for other entries, these have neither."""
    for name in ("acct", "timestamp"):
        two.near.sysctl(f"net.netfilter.nf_conntrack_{name}", 1)
    assert is_served(two, send, v6=v6)
    ask_endpoint(two, send, v6=v6)
    for word in ("packets=", "delta-time="):
        assert {word in line for line in lines(two.near, TARGET)} == {True}
        assert {word in line for line in lines(two.near, FRONTENDS.nodeport)} == {False}


def to_port(port: int) -> bytes:
    """The attribute CTA_PROTO_DST_PORT of a tuple (linux/netfilter/nfnetlink_conntrack.h)."""
    return struct.pack("=HH", 6, 3) + struct.pack("!H", port)


@families
@protocols
def test_no_events_are_told(two: TwoNodes, v6: bool, send: Send) -> None:
    """`conntrack -E` shows other entries as they come and go, and never one of these."""
    told = b""
    with nodes.entered(two.near.netns), socket(AF_NETLINK, SOCK_RAW, NETLINK_NETFILTER) as events:
        events.bind((0, NEW_UPDATE_DESTROY))
        events.setblocking(False)
        ctnetlink.delete(ctnetlink.connections(lambda *_: True))
        assert is_served(two, send, v6=v6)
        ask_endpoint(two, send, v6=v6)
        found = list(ctnetlink.connections(lambda *_: True))
        assert {FRONTENDS.nodeport, TARGET} <= {e.original.destination_port for e in found}
        ctnetlink.delete(found)
        with suppress(BlockingIOError):  # they have been told when the calls above return
            while True:
                told += events.recv(1 << 16)
    assert to_port(TARGET) in told
    assert to_port(FRONTENDS.nodeport) not in told


def counted(node: Host, comment: str) -> int:
    """How many packets the rule with this comment has counted."""
    words = [*node.enter, "nft", "list", "table", "inet", "firewall"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in text.splitlines() if f'comment "{comment}"' in line]
    return int(line.split("packets ")[1].split()[0])


@families
@protocols
def test_no_label_can_be_set(two: TwoNodes, v6: bool, send: Send) -> None:
    """`ct label set` labels other entries; a rule that matches a label finds none on these."""
    ports = {"endpoint": TARGET, "service": FRONTENDS.nodeport}
    both = "meta l4proto { tcp, udp }"
    label = [f"{both} th dport {port} ct label set 5" for port in ports.values()]
    asks = "ct original proto-dst {} ct label 5"
    count = [f'{both} {asks.format(p)} counter comment "{name}"' for name, p in ports.items()]
    every = [
        chain("prerouting", "mangle", *label),
        chain("output", "mangle", *label),
        chain("postrouting", "mangle", *count),
    ]
    with rules(two.near, "\n".join(every)):
        assert is_served(two, send, v6=v6)
        ask_endpoint(two, send, v6=v6)
        assert counted(two.near, "endpoint") > 0
        assert counted(two.near, "service") == 0


@families
def test_no_timeout_of_a_rule_applies(two: TwoNodes, v6: bool) -> None:
    """`ct timeout set` shortens the life of other entries; these have conntrack's own."""
    family = "ip6" if v6 else "ip"
    policy = "policy = { unreplied : 15, replied : 15 }"
    short = f"ct timeout short {{\nprotocol udp; l3proto {family}; {policy}\n}}"
    use = f'meta nfproto ipv{family[2:] or 4} meta l4proto udp ct timeout set "short"'
    hooks = [chain(hook, "mangle", use) for hook in ("prerouting", "output")]
    with nodes.entered(two.near.netns):
        ctnetlink.delete(ctnetlink.connections(lambda *_: True))
    with rules(two.near, "\n".join([short, *hooks])):
        assert is_served(two, requests.udp, v6=v6)
        ask_endpoint(two, requests.udp, v6=v6)
        with nodes.entered(two.near.netns):
            found = list(ctnetlink.connections(lambda *_: True))
            ctnetlink.delete(found)
    seconds = {e.original.destination_port: e.seconds for e in found}
    assert seconds[TARGET] <= 15 < seconds[FRONTENDS.nodeport]
