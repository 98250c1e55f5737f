# SPDX-License-Identifier: Apache-2.0
"""What netfilter shows and does with flows of the engine netfilter, beside kube-proxy's rules.

Each test asks the same NodePort of two nodes, one with ebpflb and one with kube-proxy's rules, and
compares both (tests/kit/beside_kube_proxy.py).
"""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from bench import kubeproxy
from bench.services import NodePort
from ebpflb.lab import cni
from ebpflb.lab.hosts import Host
from tests.kit import beside_kube_proxy, requests
from tests.kit.beside_kube_proxy import BesideKubeProxy, entries
from tests.kit.firewall import chain, rules
from tests.kit.lab_cluster import NODEPORT, TARGET
from tests.kit.parameters import protocols
from tests.kit.requests import Send

BOTH = "meta l4proto { tcp, udp }"
MARK = 0x10
MASQUERADE_MARK = 0x4000
REQUESTS = 8


def ask(pair: BesideKubeProxy, node: Host, send: Send) -> str:
    """The name of the endpoint that answers at the node's NodePort."""
    return send(pair.sockets(pair.outside), node.v4, NODEPORT).name


def both(pair: BesideKubeProxy, seen: Callable[[Host], object]) -> object:
    """What is seen on either node, which is the same."""
    ours, theirs = map(seen, pair.nodes)
    assert ours == theirs
    return ours


def counted(node: Host, comment: str) -> int:
    """How many packets the rule with this comment has counted."""
    words = [*node.enter, "nft", "list", "table", "inet", "firewall"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in text.splitlines() if f'comment "{comment}"' in line]
    return int(line.split("packets ")[1].split()[0])


@protocols
def test_a_mark_that_a_rule_sets_stays(pair: BesideKubeProxy, send: Send) -> None:
    """Behind NAT a packet has the bits of others, and not that of the masquerade."""
    mark = f"{BOTH} th dport {NODEPORT} meta mark set {MARK} ct mark set {MARK}"
    to = f"ip daddr {pair.there.v4}"
    count = f'{to} meta mark {MARK} ct mark {MARK} counter comment "seen"'
    left = f'{to} meta mark and {MASQUERADE_MARK} != 0 counter comment "left"'

    def seen(node: Host) -> tuple[bool, int]:
        hooks = chain("prerouting", "mangle", mark), chain("postrouting", "300", count, left)
        with rules(node, "\n".join(hooks)):
            assert ask(pair, node, send) == "there"
            return counted(node, "seen") >= 2, counted(node, "left")

    assert both(pair, seen) == (True, 0)


@protocols
def test_entries_are_as_kube_proxys(pair: BesideKubeProxy, send: Send) -> None:
    """A flow that was answered has the same state and status: translated both ways."""

    def seen(node: Host) -> set[tuple[str, int, str, int]]:
        pair.forget()
        with ExitStack() as stack:
            client = requests.socket_of(send, pair.sockets(pair.outside), node.v4)
            stack.enter_context(client)
            client.connect((node.v4, NODEPORT))
            for _ in range(3):
                client.send(b"?")
                assert client.recv(64)
            return {
                (each.state_name, each.status, str(each.reply.source), each.reply.source_port)
                for each in entries(node)
            }

    found = both(pair, seen)
    assert isinstance(found, set)
    assert [endpoint for _, _, *endpoint in found] == [[pair.there.v4, TARGET]]


@contextmanager
def kube_proxy_beside(pair: BesideKubeProxy, mode: str) -> Iterator[None]:
    """Rules for the same Service on ebpflb's node, which lead to an endpoint that is not there."""
    nowhere = ((cni.addresses(3, 99)[0], pair.far.name),)
    service = NodePort("web", beside_kube_proxy.SERVICE_IP, NODEPORT, ("tcp", "udp"), nowhere)
    node, pods = pair.near, cni.NETWORKS[0]
    if mode == "nftables":
        node.nft(kubeproxy.nft([service], node.name, node.v4, pods))
    else:
        words = [*node.enter, f"{mode}-restore", "--noflush"]
        subprocess.run(words, input=kubeproxy.iptables([service], pods), text=True, check=True)
    try:
        yield
    finally:
        if mode == "nftables":
            node.nft("delete table ip kube-proxy")
        else:
            empty = "".join(f"*{table}\nCOMMIT\n" for table in ("nat", "filter"))
            subprocess.run([*node.enter, f"{mode}-restore"], input=empty, text=True, check=True)


@pytest.mark.parametrize("mode", ["nftables", "iptables-legacy", "iptables-nft"])
@protocols
def test_kube_proxy_may_run_beside(pair: BesideKubeProxy, mode: str, send: Send) -> None:
    """ebpflb serves: its chain comes first. The bit that both masquerade by is used once."""
    to = f"ip daddr {pair.there.v4}"
    left = f'{to} meta mark and {MASQUERADE_MARK} != 0 counter comment "left"'
    with (
        kube_proxy_beside(pair, mode),
        rules(pair.near, chain("postrouting", "300", left)),
    ):
        for _ in range(REQUESTS):
            assert ask(pair, pair.near, send) == "there"
        assert {str(each.reply.destination) for each in entries(pair.near)} == {pair.near.v4}
        assert counted(pair.near, "left") == 0
