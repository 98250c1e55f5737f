# SPDX-License-Identifier: Apache-2.0
"""Which UDP entries of conntrack are deleted when endpoints change (kube-proxy.md 11.1)."""

import socket
from collections import Counter
from ipaddress import ip_address

import pytest

from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.node import ctnetlink, ctnetlink_messages
from ebpflb.plan.entries import Backend, Frontend
from ebpflb.plan.service_entries import BackendChange
from ebpflb.stale_udp.conntrack_entries import StaleConnections
from tests.datapath.attach.device_namespace import Namespace
from tests.datapath.variants import eventually, needs_root
from tests.node.nodes import run
from tests.stale_udp.world import ELSEWHERE, NAME, REPLACED, SERVICE, VIP, World, is_ended, settle

pytestmark = needs_root

VIP6 = Frontend(ip_address("fd00:96::10"), 53, Protocol.UDP)
ELSEWHERE6 = ELSEWHERE._replace(address=ip_address("fd00:244::9"))
NODEPORT = Frontend(ip_address("0.0.0.0"), 30053, Protocol.UDP)
NODE, OTHER_HOST = "192.0.2.1", "192.0.2.99"
SERVING, REMOVED = f"{ELSEWHERE.address}:{ELSEWHERE.port}", "10.244.8.8:5353"
ADDED = [BackendChange(NAME, (ELSEWHERE.id,), (ELSEWHERE.id, 21))]


@pytest.fixture
def net(ns: Namespace) -> Namespace:
    """All addresses are routed somewhere, so that what is sent is tracked."""
    for words in (
        "link set lo up",
        "link add away type veth peer name beyond",
        "link set beyond up",
        "link set away up arp off",
        "address add 192.0.2.77/24 dev away",
        "address add fd00::1/16 dev away nodad",
        "route add default dev away",
    ):
        ns.run(f"ip {words}")
    return ns


def tracked(
    address: str, port: int, to: str = "", *, protocol: Protocol = Protocol.UDP, source: int = 0
) -> None:
    """An entry of a client that has sent to this address, translated to ``to``, or not at all."""
    v6, datagrams = ":" in address, protocol is Protocol.UDP
    family, where = ("ip6" if v6 else "ip"), f"{protocol.name.lower()} dport {port}"
    verdict = f"dnat {family} to {to}" if to else "ct state new accept"
    chain = "type nat hook output priority -100"
    rule = f"{family} daddr {address} {where} {verdict}"
    run("nft", "-f", "-", said=f"table inet t {{\n chain c {{\n {chain}\n {rule}\n }}\n}}\n")
    kind = socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, kind) as client:
        client.bind(("", source))
        client.setblocking(False)
        client.connect_ex((address, port))
        if datagrams:
            client.send(b"?")
    run("nft", "delete", "table", "inet", "t")
    assert any(each.original.destination_port == port for each in entries())


def entries() -> list[ctnetlink.Connection]:
    return list(ctnetlink.connections(lambda *_: True))


def deleted(world: World) -> int:
    """How many were deleted; all others are there still."""
    before = len(entries())
    found = StaleConnections(world.maps).delete()
    assert len(entries()) == before - found.total()
    return found.total()


@pytest.mark.parametrize(
    ("to", "is_stale"),
    [
        (SERVING, False),
        (REMOVED, True),
        (f"{ELSEWHERE.address}:9090", True),
        ("", True),
    ],
    ids=["serving", "removed", "former target port", "never translated"],
)
def test_by_its_backend(net: Namespace, world: World, to: str, is_stale: bool) -> None:
    """An entry stays if and only if a serving endpoint answers it, at address and port."""
    tracked(str(VIP.address), VIP.port, to)
    assert deleted(world) == is_stale


def test_ipv6(net: Namespace, world: World) -> None:
    """The same, and it is counted for its family."""
    world.serve(ELSEWHERE6, frontend=VIP6)
    tracked(str(VIP6.address), 53, f"[{ELSEWHERE6.address}]:5353", source=4001)
    tracked(str(VIP6.address), 53, "[fd00:244::8]:5353", source=4002)
    assert StaleConnections(world.maps).delete() == Counter({Family.IPV6: 1})
    assert [each.original.source_port for each in entries()] == [4001]


def test_nobody_serves(net: Namespace, world: World) -> None:
    """A service without serving endpoints is not cleaned."""
    world.serve()
    tracked(str(VIP.address), VIP.port, REMOVED)
    tracked(str(VIP.address), VIP.port, "")
    assert deleted(world) == 0


def test_terminating_but_serving(net: Namespace, world: World) -> None:
    """An endpoint that gets no new flows and still serves keeps its own."""
    world.serve(ELSEWHERE._replace(flags=frozenset()))
    tracked(str(VIP.address), VIP.port, SERVING)
    assert deleted(world) == 0


def test_nodeports(net: Namespace, world: World) -> None:
    """At the node's addresses; unlike kube-proxy's, the same port of another host is left alone."""
    world.maps["node_addresses"].write([(ip_address(NODE), 1)])
    world.serve(ELSEWHERE, frontend=NODEPORT)
    tracked(NODE, NODEPORT.port, SERVING, source=4001)
    tracked(OTHER_HOST, NODEPORT.port, source=4002)
    assert deleted(world) == 0
    tracked(NODE, NODEPORT.port, REMOVED, source=4003)
    tracked(NODE, NODEPORT.port, source=4004)
    assert deleted(world) == 2


def test_others_are_left_alone(net: Namespace, world: World) -> None:
    """Other ports and addresses, and TCP."""
    tracked(str(VIP.address), 54, REMOVED)
    tracked("10.96.0.11", VIP.port, REMOVED)
    tracked(str(VIP.address), VIP.port, REMOVED, protocol=Protocol.TCP)
    world.maps["services"].write([(VIP._replace(protocol=6), world.maps["services"].get(VIP))])
    assert deleted(world) == 0


def test_slots_of_another_service(net: Namespace, world: World) -> None:
    """While a service's slots are given to another nothing of it is deleted."""
    world.serve(ELSEWHERE._replace(service=SERVICE + 1))
    tracked(str(VIP.address), VIP.port, REMOVED)
    assert deleted(world) == 0


@pytest.mark.parametrize("added", [True, False], ids=["an endpoint is added", "at the start"])
def test_each_change_of_endpoints(net: Namespace, world: World, added: bool) -> None:
    """Deleted after any change of a UDP service's endpoints, and at the agent's start; counted."""
    tracked(str(VIP.address), VIP.port, REMOVED, source=4001)
    tracked(str(VIP.address), VIP.port, SERVING, source=4002)
    if added:
        world.worker.check(ADDED)
    else:
        world.worker.check_everything()
    assert eventually(lambda: len(entries()) == 1)
    settle(world)
    assert [each.original.source_port for each in entries()] == [4002]
    assert sum(count for _, count in world.found) == 1


def test_shadow(net: Namespace, world: World) -> None:
    """Nothing of a kube-proxy beside is touched: neither its entries, nor sockets that it serves,
    also those that have no entry any more.
    """
    tracked(str(VIP.address), VIP.port, REMOVED)
    world.maps["cluster_ips"].write([(VIP.address, 1)])
    client, before = world.open(), len(entries())
    client.connect((str(VIP.address), VIP.port))
    world.worker.shadow = True
    world.worker.check(ADDED)
    world.worker.check_everything()
    settle(world)
    assert len(entries()) == before
    assert client.getpeername() == (str(VIP.address), VIP.port)
    world.worker.shadow = False
    world.worker.check(ADDED)
    settle(world)
    assert not entries()
    with pytest.raises(OSError, match="not connected"):
        client.getpeername()


def test_changes_of_tcp_alone(net: Namespace, world: World) -> None:
    """TCP's endpoints are no reason to search."""
    tracked(str(VIP.address), VIP.port, REMOVED)
    name = PortName(*NAME[:3], Protocol.TCP, Family.IPV4)
    world.worker.check([BackendChange(name, (1,), (2,))])
    settle(world)
    assert len(entries()) == 1


def test_unreadable(
    net: Namespace, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If conntrack cannot be listed that is told, sockets are ended all the same, and it is tried
    again.
    """
    tracked(str(VIP.address), VIP.port, REMOVED)
    client = world.remember(world.direct())
    with monkeypatch.context() as patched:
        patched.setattr(ctnetlink_messages, "GET", 99 << 8 | 1)  # of no subsystem
        world.worker.check(REPLACED)
        assert is_ended(client)
        assert eventually(lambda: world.worker.error)
    assert "conntrack cannot be listed" in caplog.text
    assert eventually(lambda: not entries())


def test_many(net: Namespace, world: World) -> None:
    """Thousands of stale entries among others are deleted in one search."""
    backends = [
        Backend(ip_address(f"10.244.7.{n}"), 53, frozenset({"cluster"}), n, SERVICE)
        for n in range(1, 9)
    ]
    world.serve(*backends)
    chain = "type nat hook output priority -100"
    rule = f"udp sport 10000-11999 udp dport 53 dnat ip to {REMOVED}"
    run("nft", "-f", "-", said=f"table inet t {{\n chain c {{\n {chain}\n {rule}\n }}\n}}\n")
    for source in range(10000, 13000):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.bind(("", source))
            client.sendto(b"?", (str(VIP.address) if source < 12000 else "10.9.9.9", 53))
    assert deleted(world) == 2000
