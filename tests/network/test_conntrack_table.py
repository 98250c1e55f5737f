# SPDX-License-Identifier: Apache-2.0
"""What becomes of connections that conntrack translates when nothing asks for NAT any more.

A rule opens them here and is gone then, as the entries of the conntrack engine are made without a
rule: whoever made an entry, the kernel translates by it as long as its hooks are there.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from socket import AF_INET, AF_INET6, SOCK_STREAM

import pytest

from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.sockets import Socket, Sockets
from ebpflb.node import nat
from ebpflb.node.nft import Name
from tests.node import nodes

PREFIX = f"ebpflb-test-{os.getpid()}-cttable"
PORT, TARGET = 30080, 8080
RULE = """
table inet once {{
  chain c {{
    type nat hook prerouting priority dstnat
    tcp dport {port} dnat ip to {v4}:{target}
    tcp dport {port} dnat ip6 to [{v6}]:{target}
  }}
}}
"""


class World:
    """A node, a pod that serves, and a client outside."""

    def __init__(self, lab: Lab) -> None:
        self.node = lab.node("node", 1)
        self.pod = lab.pod(self.node, "pod", 2)
        self.outside = lab.outside("outside", 1)
        self.stack = ExitStack()
        self.hosts: dict[str, Sockets] = {}

    def sockets(self, host: Host) -> Sockets:
        if host.name not in self.hosts:
            self.hosts[host.name] = Sockets(host)
            self.stack.callback(self.hosts[host.name].close)
        return self.hosts[host.name]

    def connection(self, kind: int) -> tuple[Socket, Socket]:
        """Both ends of one to the node's port, which a rule sends to the pod; the rule is gone."""
        where = self.node.v6 if kind == AF_INET6 else self.node.v4
        server = self.sockets(self.pod).open(kind, SOCK_STREAM)
        server.bind(("::" if kind == AF_INET6 else "0.0.0.0", TARGET))
        server.listen()
        rule = RULE.format(port=PORT, target=TARGET, v4=self.pod.v4, v6=self.pod.v6)
        self.node.nft(rule)
        client = self.sockets(self.outside).open(kind, SOCK_STREAM)
        client.connect((where, PORT))
        peer, _ = server.accept()
        self.node.nft("delete table inet once")
        return client, peer


@pytest.fixture
def world() -> Iterator[World]:
    with Lab(PREFIX) as lab:
        made = World(lab)
        with made.stack, nodes.entered(made.node.netns):
            yield made


def goes_on(client: Socket, peer: Socket) -> bool:
    """Whether something said by each side reaches the other."""
    try:
        for one, other in ((client, peer), (peer, client)):
            one.send(b"still here")
            assert other.recv(64) == b"still here"
    except OSError:
        return False
    return True


both = pytest.mark.parametrize("kind", [AF_INET, AF_INET6], ids=["v4", "v6"])


@both
@pytest.mark.parametrize("table", [nat.ENGINE, nat.HOLD], ids=str)
def test_connections_go_on_with_our_table_alone(world: World, kind: int, table: Name) -> None:
    """No rule is left that translates; each of our tables keeps the kernel translating."""
    nat.keep_nat_hooks(table)
    client, peer = world.connection(kind)
    assert goes_on(client, peer)
    assert not nat.release_when_unused(table), "so cleanup leaves it"
    assert goes_on(client, peer)


@both
def test_connections_break_without_any_table(world: World, kind: int) -> None:
    """That is why cleanup leaves ours: with the last table the kernel stops translating."""
    nat.keep_nat_hooks(nat.ENGINE)
    client, peer = world.connection(kind)
    assert goes_on(client, peer)
    nat.release_nat_hooks(nat.ENGINE)
    for end in (client, peer):
        end.settimeout(1.0)
    assert not goes_on(client, peer)


@both
def test_rules_of_another_keep_connections_alive(world: World, kind: int) -> None:
    """Where somebody else has NAT rules for the family, as kube-proxy has, ours may go."""
    nat.keep_nat_hooks(nat.ENGINE)
    client, peer = world.connection(kind)
    chain = "chain c {\n type nat hook postrouting priority srcnat\n mark 0x4000 masquerade\n }"
    for family in ("ip", "ip6"):
        world.node.nft(f"table {family} kube-proxy {{\n {chain}\n}}")
    nat.release_nat_hooks(nat.ENGINE)
    assert goes_on(client, peer)


@both
def test_a_table_put_back_in_time_loses_no_connection(world: World, kind: int) -> None:
    """Removed and put back while nothing is sent, as the watch does: the connection goes on."""
    nat.keep_nat_hooks(nat.ENGINE)
    client, peer = world.connection(kind)
    world.node.nft("flush ruleset")
    assert nat.keep_nat_hooks(nat.ENGINE)
    assert goes_on(client, peer)
