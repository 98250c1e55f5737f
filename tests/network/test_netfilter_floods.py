# SPDX-License-Identifier: Apache-2.0
"""What floods leave in conntrack with the engine netfilter, beside a node with kube-proxy's rules.

The same packets go to a NodePort of each. The endpoint is on another node, so both masquerade.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from bench.conntrack_filler import full
from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from tests.kernel.node import nodes
from tests.kit import requests
from tests.kit.beside_kube_proxy import BesideKubeProxy, entries, kinds
from tests.kit.firewall import chain, rules
from tests.kit.flood import SOURCE_PORT
from tests.kit.lab_cluster import NODEPORT
from tests.load import scaled

SYNS = scaled(5000)
SYN_SENT_SECONDS = 6
NEW_CLIENTS = 200
CLIENTS = "172.24.0.1"  # the first of their addresses
A_MOMENT = 0.5  # seconds in which nothing may happen
PRIVILEGED = 400  # a source port of the class 1 to 511, in which nf_nat keeps it
PORTS_OF_ITS_CLASS = 511


def flooded(pair: BesideKubeProxy, count: int, source_port: int = SOURCE_PORT) -> None:
    for node in pair.nodes:
        pair.flood(node, count, source_port=source_port)


@contextmanager
def sysctl(pair: BesideKubeProxy, name: str, value: int) -> Iterator[None]:
    """On both nodes, as long as this lasts."""
    dotted, path = f"net.netfilter.{name}", Path("/proc/sys/net/netfilter", name)
    with ExitStack() as stack:
        for node in pair.nodes:
            with nodes.entered(node.netns):
                stack.callback(node.sysctl, dotted, path.read_text())
            node.sysctl(dotted, value)
        yield


@pytest.mark.parametrize("answers", [True, False], ids=["answered", "unanswered"])
def test_a_syn_flood_leaves_the_table_as_kube_proxys_would(
    pair: BesideKubeProxy, answers: bool
) -> None:
    """As many entries, in the same states, translated alike, with the same time to live."""
    with ExitStack() as stack:
        if not answers:
            stack.enter_context(pair.mute())
        flooded(pair, SYNS)
    ours, theirs = map(kinds, pair.nodes)
    assert set(ours) == set(theirs)
    assert {state for state, _ in ours} == {"syn-recv" if answers else "syn-sent"}
    for kind, count in theirs.items():
        assert abs(ours[kind] - count) <= SYNS // 50
    seconds = [{entry.seconds for entry in entries(node)} for node in pair.nodes]
    longest = 60 if answers else 120
    assert all(longest - 30 < each <= longest for node in seconds for each in node)


def is_empty(node: Host) -> bool:
    return not entries(node)


def test_unanswered_connections_end_by_conntracks_own_time(pair: BesideKubeProxy) -> None:
    """An entry of a SYN that nobody answers lives as long as the sysctl says, not longer."""
    with sysctl(pair, "nf_conntrack_tcp_timeout_syn_sent", SYN_SENT_SECONDS), pair.mute():
        for node in pair.nodes:
            pair.flood(node, 100)
            left = {entry.seconds for entry in entries(node)}
            assert left
            assert max(left) <= SYN_SENT_SECONDS
        for node in pair.nodes:
            wait_until("the entries have timed out", partial(is_empty, node))


def test_exhausted_source_ports_are_no_worse_than_kube_proxys(pair: BesideKubeProxy) -> None:
    """Of clients that share a class of 511 ports, about as many get one as with kube-proxy, each
    its own; the packets of the others are dropped, and leave no entry. Other clients go on.
    """
    flooded(pair, 3 * PORTS_OF_ITS_CLASS, source_port=PRIVILEGED)
    for node in pair.nodes:
        ports = [entry.reply.destination_port for entry in entries(node)]
        assert len(set(ports)) == len(ports)
        assert max(ports) <= PORTS_OF_ITS_CLASS
        assert requests.tcp(pair.sockets(pair.outside), node.v4, NODEPORT).name == "there"
    ours, theirs = (len(entries(node)) for node in pair.nodes)
    assert ours >= theirs - PORTS_OF_ITS_CLASS // 20


@pytest.mark.parametrize(
    ("hook", "priority"),
    [("prerouting", "raw"), ("prerouting", "mangle"), ("forward", "filter")],
    ids=["raw", "mangle", "forward"],
)
def test_dropped_packets_leave_no_entry(pair: BesideKubeProxy, hook: str, priority: str) -> None:
    """Wherever a firewall drops them."""
    drop = "ip saddr 172.16.0.0/16 meta l4proto tcp drop"
    for node in pair.nodes:
        with rules(node, chain(hook, priority, drop)):
            pair.flood(node, 100)
            assert not entries(node)
        pair.flood(node, 100)
        assert len(entries(node)) == 100


def is_lost(pair: BesideKubeProxy, node: Host, kind: str) -> bool:
    """Whether neither an answer nor an error comes."""
    make = requests.tcp_socket if kind == "tcp" else requests.udp_socket
    with make(pair.sockets(pair.outside), node.v4) as client:
        client.settimeout(A_MOMENT)
        try:
            client.connect((node.v4, NODEPORT))
            client.send(b"?")
            client.recv(64)
        except TimeoutError:
            return True
        return False


@pytest.mark.extended
def test_a_full_table_is_no_worse_than_kube_proxys(pair: BesideKubeProxy) -> None:
    """New clients are dropped, and served when there is room; connections go on."""
    for node in pair.nodes:
        with requests.tcp_socket(pair.sockets(pair.outside), node.v4) as client:
            client.connect((node.v4, NODEPORT))
            client.recv(64)
            with full(node):
                assert [is_lost(pair, node, kind) for kind in ("tcp", "udp")] == [True, True]
                client.send(b"still here")
                assert client.recv(64) == b"still here"
                if node is pair.near:
                    said = pair.status()
                    assert said["conntrack"]["entries"] == said["conntrack"]["limit"]
                    assert "conntrack full" in [each["cause"] for each in said["reasons"]]
            assert not is_lost(pair, node, "tcp")


@pytest.mark.extended
def test_half_open_flows_make_room_as_for_kube_proxy(pair: BesideKubeProxy) -> None:
    """The kernel looks for a half-open flow near the place of a new one: as many of the new clients
    find room as with kube-proxy.

    Once a minute or less the kernel removes all half-open ones of such a table, whoever made them:
    what is seen while it does counts for neither.
    """
    ours, theirs = (found_room_without_removal(pair, node) for node in pair.nodes)
    assert abs(ours - theirs) < NEW_CLIENTS // 4


def found_room_without_removal(pair: BesideKubeProxy, node: Host) -> int:
    """How many of NEW_CLIENTS have an entry, next to those of a flood that nobody answers."""
    while True:
        with full(node, free=SYNS):
            with pair.mute():
                pair.flood(node, 2 * SYNS)
            pair.flood(node, NEW_CLIENTS, CLIENTS)
            time.sleep(A_MOMENT)  # for a removal that has begun, which takes some milliseconds
            with nodes.entered(node.netns):
                is_full = conntrack.count() > conntrack.limit() - SYNS // 10
            left = Counter(str(e.original.source).startswith("172.24.") for e in entries(node))
        if is_full and left[False]:
            return left[True]
