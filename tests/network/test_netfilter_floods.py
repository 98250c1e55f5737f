# SPDX-License-Identifier: Apache-2.0
"""Conntrack entries after floods with the engine netfilter, and with kube-proxy's rules.

The same packets go to a NodePort of each node. The endpoint is on another node, so both masquerade.
"""

from contextlib import ExitStack

import pytest

from bench.conntrack_filler import full
from ebpflb.lab.hosts import Host
from tests.kit import requests
from tests.kit.beside_kube_proxy import BesideKubeProxy, entries, kinds
from tests.kit.firewall import chain, rules
from tests.kit.flood import SOURCE_PORT
from tests.kit.lab_cluster import NODEPORT
from tests.load import scaled

SYNS = scaled(5000)
A_MOMENT = 0.5  # seconds in which nothing may happen


def flooded(pair: BesideKubeProxy, count: int, source_port: int = SOURCE_PORT) -> None:
    for node in pair.nodes:
        pair.flood(node, count, source_port=source_port)


@pytest.mark.parametrize("answers", [True, False], ids=["answered", "unanswered"])
def test_a_syn_flood_leaves_the_table_as_kube_proxys_would(
    pair: BesideKubeProxy, answers: bool
) -> None:
    """Number, states, translations and timeouts of the entries are the same."""
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


@pytest.mark.parametrize(
    ("hook", "priority"),
    [("prerouting", "raw"), ("prerouting", "mangle"), ("forward", "filter")],
    ids=["raw", "mangle", "forward"],
)
def test_dropped_packets_leave_no_entry(pair: BesideKubeProxy, hook: str, priority: str) -> None:
    """Dropped packets leave no entry, wherever a firewall drops them."""
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
    """New clients are dropped while the table is full, and served when there is room; open
    connections continue.
    """
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
