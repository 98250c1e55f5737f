# SPDX-License-Identifier: Apache-2.0
"""Which entries of conntrack are deleted when endpoints change (kube-proxy.md 11.1)."""

import socket
from ipaddress import ip_address

import pytest

from ebpflb.entries.flows import Hook, Tuple
from ebpflb.entries.services import Backend, Frontend
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.stale import Ended, ServedFrontends, delete_entries, delete_flows
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.stale import Removal, Resets, Stale, Watched
from tests.agent.stale.tracked import GONE, REMOVED, SERVING, entries, tracked
from tests.agent.stale.world import ELSEWHERE, SERVICE, UDP, VIP, World, removed, settle
from tests.kernel.attach.device_namespace import Namespace
from tests.kernel.node.nodes import run
from tests.kernel.variants import eventually, needs_root

pytestmark = needs_root

VIP6 = Frontend(ip_address("fd00:96::10"), 53, Protocol.UDP)
ELSEWHERE6 = ELSEWHERE._replace(address=ip_address("fd00:244::9"))
NODEPORT = Frontend(ip_address("0.0.0.0"), 30053, Protocol.UDP)
NODE, OTHER_HOST = "192.0.2.1", "192.0.2.99"
OF_TCP = VIP._replace(protocol=Protocol.TCP)


def judge(world: World, *removals: Removal, resets: Resets | None = None) -> Stale:
    served = ServedFrontends(world.maps)
    return Stale(served.endpoints, served.keys, removals, resets)


def deleted(world: World, *removals: Removal) -> int:
    """Return how many UDP entries were deleted; check that all others still exist."""
    before, stale = len(entries()), judge(world, *removals)
    ports = stale.ports if removals else None
    endpoints = stale.udp_endpoints if removals else None
    found = delete_entries(world.maps, stale, {Protocol.UDP}, ports, endpoints)
    assert len(entries()) == before - found.total()
    return found.total()


def left() -> set[int]:
    return {each.original.source_port for each in entries()}


@pytest.mark.parametrize(
    ("to", "is_stale"),
    [(SERVING, False), (REMOVED, True), (f"{ELSEWHERE.address}:9090", True), ("", True)],
    ids=["serving", "removed", "former target port", "never translated"],
)
def test_by_its_backend(net: Namespace, world: World, to: str, is_stale: bool) -> None:
    """An entry stays if and only if a serving endpoint answers it, by address and port."""
    tracked(str(VIP.address), VIP.port, to)
    assert deleted(world) == is_stale


def test_entries_of_ipv6_are_deleted_too(net: Namespace, world: World) -> None:
    world.serve(ELSEWHERE6, frontend=VIP6)
    tracked(str(VIP6.address), 53, f"[{ELSEWHERE6.address}]:5353", source=4001)
    tracked(str(VIP6.address), 53, "[fd00:244::8]:5353", source=4002)
    assert deleted(world) == 1
    assert left() == {4001}


def test_only_frontends_that_changed_are_looked_at(net: Namespace, world: World) -> None:
    """Only entries with the port of a changed frontend are read; at a start all entries are."""
    tracked(str(VIP.address), VIP.port, REMOVED)
    assert deleted(world, removed(GONE)._replace(frontends={NODEPORT})) == 0
    assert deleted(world) == 1


def test_entries_to_nodeports_of_this_node_are_deleted(net: Namespace, world: World) -> None:
    """Entries to a NodePort at an address of this node are deleted; entries to the same port of
    other hosts stay, unlike with kube-proxy.
    """
    world.maps["node_addresses"].write([(ip_address(NODE), 1)])
    world.serve(ELSEWHERE, frontend=NODEPORT)
    tracked(NODE, NODEPORT.port, SERVING, source=4001)
    tracked(OTHER_HOST, NODEPORT.port, source=4002)
    assert deleted(world) == 0
    tracked(NODE, NODEPORT.port, REMOVED, source=4003)
    tracked(NODE, NODEPORT.port, source=4004)
    assert deleted(world) == 2


def test_others_are_left_alone(net: Namespace, world: World) -> None:
    """Entries for other ports and addresses, and TCP entries, are left alone."""
    tracked(str(VIP.address), 54, REMOVED)
    tracked("10.96.0.11", VIP.port, REMOVED)
    tracked(str(VIP.address), VIP.port, REMOVED, protocol=Protocol.TCP)
    world.maps["services"].write([(VIP._replace(protocol=6), world.maps["services"].get(VIP))])
    assert deleted(world) == 0


@pytest.mark.parametrize("untranslated", [False, True])
@pytest.mark.parametrize(("to", "goes"), [("", True), (SERVING, False)])
def test_connections_that_began_untranslated(
    net: Namespace, world: World, to: str, goes: bool, untranslated: bool
) -> None:
    """An entry of an untranslated SYN is deleted, so that the next SYN is translated."""
    world.maps["services"].write([(OF_TCP, world.maps["services"].get(VIP))])
    tracked(str(VIP.address), VIP.port, to, protocol=Protocol.TCP)
    tracked("10.96.0.11", VIP.port, protocol=Protocol.TCP)
    found = delete_entries(world.maps, judge(world), {Protocol.TCP}, untranslated=untranslated)
    assert (found.total(), len(entries())) == (goes, 2 - goes)


def test_a_new_device_takes_no_list_of_all_entries(net: Namespace, world: World) -> None:
    """Only untranslated entries are searched for: the kernel leaves out translated ones."""
    tracked(str(VIP.address), VIP.port, REMOVED, source=4001)
    tracked(str(VIP.address), VIP.port, "", source=4002)
    world.worker.check_untranslated()
    assert eventually(lambda: len(entries()) == 1)
    settle(world)
    assert left() == {4001}


@pytest.mark.parametrize("renamed", [False, True])
def test_connections_without_an_answer(net: Namespace, world: World, renamed: bool) -> None:
    """An unanswered TCP entry to a removed endpoint is deleted when anything of the frontend is
    removed, unless the endpoint still serves the frontend under another port name.
    """
    world.serve(ELSEWHERE, frontend=OF_TCP)
    tracked(str(VIP.address), VIP.port, REMOVED, protocol=Protocol.TCP, source=4001)
    tracked(str(VIP.address), VIP.port, SERVING, protocol=Protocol.TCP, source=4002)
    tracked("10.96.0.11", VIP.port, REMOVED, protocol=Protocol.TCP, source=4003)
    gone = ELSEWHERE.address, ELSEWHERE.port
    world.worker.check([removed(gone if renamed else GONE, protocol=Protocol.TCP)])
    settle(world)
    assert left() == {4002, 4003}


def test_open_connections_are_reset_with_on_removal_alone(net: Namespace, world: World) -> None:
    """The client's next segment goes to another endpoint, which resets the connection."""
    rule = f"ip daddr {VIP.address} tcp dport {VIP.port} dnat ip to 127.0.0.1:8053"
    chain = "type nat hook output priority -100"
    run("nft", "-f", "-", said=f"table inet t {{\n chain c {{\n {chain}\n {rule}\n }}\n}}\n")
    resets, name = Resets(), PortName("default", "web", "tcp", Protocol.TCP, Family.IPV4)
    resets.update(name, Watched(0.0, frozenset({OF_TCP})), 0.0)
    world.serve(ELSEWHERE, frontend=OF_TCP)
    with socket.create_server(("127.0.0.1", 8053)), socket.socket() as client:
        client.connect((str(VIP.address), VIP.port))
        kept = delete_entries(world.maps, judge(world), {Protocol.TCP}, are_open=True)
        assert not kept
        stale = judge(world, resets=resets)
        ended = delete_entries(world.maps, stale, {Protocol.TCP}, stale.ports, are_open=True)
        endpoint = ip_address("127.0.0.1"), 8053
        assert ended == Ended({(OF_TCP, endpoint): 1})
        assert stale.reset_by(OF_TCP, endpoint) == name


def test_what_programs_report(net: Namespace, world: World) -> None:
    """Only the entries of stale flows are deleted, found by a hash.

    A kube-proxy, or an earlier choice, may have sent a flow to another endpoint than the program.
    """
    tracked(str(VIP.address), VIP.port, SERVING, source=4001)
    tracked(str(VIP.address), VIP.port, REMOVED, source=4002)
    tracked(str(VIP.address), VIP.port, REMOVED, source=4003)
    flows = [flow_of(4001), flow_of(4002), flow_of(4002)._replace(source_port=4009)]
    assert delete_flows(judge(world), flows).total() == 1
    assert left() == {4001, 4003}


def flow_of(source_port: int) -> Tuple:
    """Return the flow of ``tracked`` from this port, as ingress sees it."""
    (entry,) = (e for e in entries() if e.original.source_port == source_port)
    return Tuple(*entry.original, UDP, Hook.INGRESS)


@pytest.mark.parametrize("v6", [False, True])
def test_the_kernel_lists_the_entries_of_a_removed_endpoint(
    net: Namespace, world: World, v6: bool
) -> None:
    """No entry for another port is read, and with IPv4 none for another address."""
    vip, gone, others = (
        (VIP6, "[fd00:244::7]:53", ("[fd00:244::9]:53", "[fd00:244::7]:54"))
        if v6
        else (VIP, REMOVED, (SERVING, f"{GONE[0]}:54"))
    )
    for source, to in enumerate((gone, *others), start=4001):
        tracked(str(vip.address), vip.port, to, source=source)
    address, _, port = gone.rpartition(":")
    endpoint = ip_address(address.strip("[]")), int(port)
    listed = conntrack.connections(lambda *_: True, Protocol.UDP, endpoint=endpoint)
    ports = {each.original.source_port for each in listed}
    assert ports == ({4001, 4002} if v6 else {4001})


def test_thousands_are_deleted_in_one_search(net: Namespace, world: World) -> None:
    """Thousands of stale entries between other entries are deleted in one search."""
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
