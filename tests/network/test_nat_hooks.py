# SPDX-License-Identifier: Apache-2.0
"""What becomes of connections that conntrack translates when nothing asks for NAT any more.

A rule opens them here and is removed then, as kube-proxy's rules are when ebpflb takes over. The
kernel translates by the conntrack entry as long as its hooks are in place.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from socket import AF_INET, AF_INET6, SOCK_STREAM

import pytest

from ebpflb.kernel.netfilter import conntrack, nft, watch
from ebpflb.kernel.netfilter.table import Keeper, NetfilterTable, TableOptions, remove
from ebpflb.lab.hosts import Host, Lab
from tests.kernel.node import nodes
from tests.kit import needs
from tests.kit.lab_cluster import new_lab
from tests.kit.sockets import Socket, Sockets

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
    with new_lab() as lab:
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


@contextmanager
def hold() -> Iterator[None]:
    """What stays while kube-proxy's connections are open."""
    watch.keep_nat_hooks()
    yield
    nft.delete(watch.HOLD)


@contextmanager
def engine() -> Iterator[None]:
    """The table of the engine netfilter, which its agent has left."""
    table = NetfilterTable(TableOptions(0x4000, ((1024, 39999),), drops_invalid=True, sctp=False))
    table.build()
    table.close()
    yield
    remove()


@contextmanager
def keeper() -> Iterator[None]:
    """The table that an agent owns on kernels from 5.12 to 6.8."""
    needs.owned_tables()
    kept = Keeper()
    assert kept.open()
    yield
    kept.close()


Keeps = Callable[[], AbstractContextManager[None]]
both = pytest.mark.parametrize("kind", [AF_INET, AF_INET6], ids=["v4", "v6"])
each_table = pytest.mark.parametrize("keeps", [hold, engine, keeper])


@both
def test_a_table_in_use_is_not_released(world: World, kind: int) -> None:
    """So ``ebpflb cleanup`` leaves it, and removes it when the connections have ended."""
    watch.keep_nat_hooks()
    client, peer = world.connection(kind)
    assert not watch.release_when_unused(watch.HOLD)
    assert goes_on(client, peer)
    conntrack.delete(conntrack.connections(lambda *_: True))
    assert watch.release_when_unused(watch.HOLD)
    assert not nft.exists(watch.HOLD)


@each_table
@both
def test_connections_break_without_any_table(world: World, kind: int, keeps: Keeps) -> None:
    """Cleanup leaves ours for this reason: with the last table the kernel stops translating."""
    with keeps():
        client, peer = world.connection(kind)
        assert goes_on(client, peer)
    for end in (client, peer):
        end.settimeout(1.0)
    assert not goes_on(client, peer)


@both
def test_rules_of_another_keep_connections_alive(world: World, kind: int) -> None:
    """Ours may go where another program has NAT rules for the family, as kube-proxy has."""
    with engine():
        client, peer = world.connection(kind)
        chain = "chain c {\n type nat hook postrouting priority srcnat\n mark 0x4000 masquerade\n }"
        for family in ("ip", "ip6"):
            world.node.nft(f"table {family} kube-proxy {{\n {chain}\n}}")
    assert goes_on(client, peer)


@both
def test_a_table_put_back_in_time_loses_no_connection(world: World, kind: int) -> None:
    """Removed and put back while nothing is sent, as the watch does: the connection goes on."""
    watch.keep_nat_hooks()
    client, peer = world.connection(kind)
    world.node.nft("flush ruleset")
    assert watch.keep_nat_hooks()
    assert goes_on(client, peer)


@both
def test_the_keeper_outlives_a_flush(world: World, kind: int) -> None:
    """On kernels before 6.9: the engine's table goes with the ruleset, the Keeper's stays."""
    with keeper():
        client, peer = world.connection(kind)
        world.node.nft("flush ruleset")
        assert goes_on(client, peer)
