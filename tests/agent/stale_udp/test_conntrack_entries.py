# SPDX-License-Identifier: Apache-2.0
"""Which UDP entries of conntrack are deleted when endpoints change (kube-proxy.md 11.1)."""

import errno
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from ipaddress import ip_address

import pytest

from ebpflb.agent.stale_udp import conntrack_worker
from ebpflb.agent.stale_udp.conntrack_worker import (
    StaleConnections,
    StaleConnectionsWorker,
    Whole,
)
from ebpflb.agent.stale_udp.socket_search import Counts
from ebpflb.entries.flows import StaleCandidates, Unanswered
from ebpflb.entries.services import Backend, Frontend
from ebpflb.errors import KernelError, NodeError
from ebpflb.kernel.maps.readers import MOST_REPORTS
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.node.sock_diag import SockDiag
from ebpflb.model.addresses import Family
from ebpflb.model.services import Protocol
from ebpflb.plan.service_entries import BackendChange
from tests.agent.stale_udp.tracked import (
    GONE,
    REMOVED,
    SERVING,
    change,
    entries,
    tracked,
)
from tests.agent.stale_udp.world import (
    ELSEWHERE,
    NAME,
    SERVICE,
    VIP,
    World,
    is_ended,
    settle,
)
from tests.kernel.attach.device_namespace import Namespace
from tests.kernel.node.nodes import run
from tests.kernel.variants import eventually, needs_root

pytestmark = needs_root

VIP6 = Frontend(ip_address("fd00:96::10"), 53, Protocol.UDP)
ELSEWHERE6 = ELSEWHERE._replace(address=ip_address("fd00:244::9"))
NODEPORT = Frontend(ip_address("0.0.0.0"), 30053, Protocol.UDP)
NODE, OTHER_HOST = "192.0.2.1", "192.0.2.99"


def deleted(world: World) -> int:
    """How many were deleted; all others are there still."""
    before = len(entries())
    found = StaleConnections(world.maps).delete_all()
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
    connections = StaleConnections(world.maps)
    assert connections.delete(StaleCandidates(VIP6, (ELSEWHERE6.address, 5353))) == Counter()
    gone = StaleCandidates(VIP6, (ip_address("fd00:244::8"), 5353))
    assert connections.delete(gone) == Counter({Family.IPV6: 1})
    assert [each.original.source_port for each in entries()] == [4001]


@pytest.mark.parametrize(
    ("candidates", "of_kernel", "of_list"),
    [
        (GONE, [4001], [4001, 4003]),
        (StaleCandidates(VIP, None), [4001, 4003], [4001, 4003]),
        (StaleCandidates(VIP, (ELSEWHERE.address, ELSEWHERE.port)), [], []),
        (StaleCandidates(VIP._replace(port=54), None), [], []),
    ],
    ids=["one backend's", "a frontend's", "it serves again", "no frontend"],
)
@pytest.mark.parametrize("can_delete", [True, False], ids=["deleted by the kernel", "listed"])
def test_only_candidates(
    net: Namespace,
    world: World,
    candidates: StaleCandidates,
    of_kernel: list[int],
    of_list: list[int],
    can_delete: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a removed backend, or of a frontend, that are stale. Where the kernel cannot delete
    them itself all stale ones of the frontend go.
    """
    tracked(str(VIP.address), VIP.port, REMOVED, source=4001)
    tracked(str(VIP.address), VIP.port, SERVING, source=4002)
    tracked(str(VIP.address), VIP.port, "", source=4003)
    tracked("10.96.0.11", VIP.port, REMOVED, source=4004)
    backend = (ip_address("10.244.8.8"), 1)
    if not can_delete or conntrack.delete_answered(conntrack.tuple_to(VIP), backend) is None:
        monkeypatch.setattr(conntrack, "delete_answered", lambda *_: None)
        of_kernel = of_list
    found = StaleConnections(world.maps).delete(candidates)
    left = {each.original.source_port for each in entries()}
    assert left == {4001, 4002, 4003, 4004} - {*of_kernel}
    assert found.total() == len(of_kernel)


def test_nobody_serves(net: Namespace, world: World) -> None:
    """Entries to a removed endpoint of a Service without endpoints are deleted. The other entries
    matter to no one; they are deleted when an endpoint comes.
    """
    world.serve()
    tracked(str(VIP.address), VIP.port, REMOVED, source=4001)
    tracked(str(VIP.address), VIP.port, "", source=4002)
    assert deleted(world) == 1
    assert [each.original.source_port for each in entries()] == [4002]


@pytest.mark.parametrize("many", [False, True], ids=["its search", "all entries"])
@pytest.mark.parametrize(("frontend", "node"), [(VIP, ""), (NODEPORT, NODE)], ids=str)
def test_deleted_service(
    net: Namespace, world: World, frontend: Frontend, node: str, many: bool
) -> None:
    """Entries to its endpoints are deleted; what nothing translates, and other hosts', are not."""
    world.maps["services"].delete([VIP])
    world.maps["node_addresses"].write([(ip_address(NODE), 1)])
    address = node or str(frontend.address)
    tracked(address, frontend.port, REMOVED, source=4001)
    tracked(address, frontend.port, "", source=4002)
    tracked(OTHER_HOST, frontend.port, REMOVED, source=4003)
    connections = StaleConnections(world.maps)
    if many:
        connections.delete_all({frontend})
    else:
        connections.delete(StaleCandidates(frontend, None))
    assert {each.original.source_port for each in entries()} == {4002, 4003}


def test_foreign_entries(net: Namespace, world: World) -> None:
    """What others translate, at addresses that are no one's frontend, stays."""
    world.maps["services"].delete([VIP])
    tracked(str(VIP.address), VIP.port, REMOVED)
    assert deleted(world) == 0


def test_nobody_serves_and_the_network_does(net: Namespace, world: World) -> None:
    """With "passthrough" an entry to a removed endpoint ends, and one that goes on stays."""
    world.serve(flags=frozenset({"external", "local", "passthrough"}))
    tracked(str(VIP.address), VIP.port, "", source=4001)
    tracked(str(VIP.address), VIP.port, REMOVED, source=4002)
    assert deleted(world) == 1
    assert [each.original.source_port for each in entries()] == [4001]


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


@pytest.mark.parametrize("search", ["delete_all", "delete_untranslated"])
@pytest.mark.parametrize(("to", "goes"), [("", True), (SERVING, False)])
def test_connections_that_began_untranslated(
    net: Namespace, world: World, to: str, goes: bool, search: str
) -> None:
    """The entry of a SYN that came before anything could translate it goes, so that the SYN that
    follows is translated.
    """
    world.maps["services"].write([(VIP._replace(protocol=6), world.maps["services"].get(VIP))])
    tracked(str(VIP.address), VIP.port, to, protocol=Protocol.TCP)
    tracked("10.96.0.11", VIP.port, protocol=Protocol.TCP)
    before = len(entries())
    getattr(StaleConnections(world.maps), search)()
    assert len(entries()) == before - goes


def test_a_new_device_takes_no_list_of_all_entries(net: Namespace, world: World) -> None:
    """Only what came untranslated is searched for: the kernel leaves out everything else."""
    tracked(str(VIP.address), VIP.port, REMOVED, source=4001)
    tracked(str(VIP.address), VIP.port, "", source=4002)
    world.connections.check_untranslated()
    assert eventually(lambda: len(entries()) == 1)
    settle(world)
    assert [each.original.source_port for each in entries()] == [4001]


def test_slots_of_another_service(net: Namespace, world: World) -> None:
    """While a service's slots are given to another nothing of it is deleted."""
    world.serve(ELSEWHERE._replace(service=SERVICE + 1))
    tracked(str(VIP.address), VIP.port, REMOVED)
    assert deleted(world) == 0


@pytest.mark.parametrize("candidates", [GONE, None], ids=["a backend is removed", "at the start"])
def test_deleted_after_a_change(
    net: Namespace, world: World, candidates: StaleCandidates | None
) -> None:
    """When a UDP service loses a backend, and at the agent's start; counted."""
    tracked(str(VIP.address), VIP.port, REMOVED, source=4001)
    tracked(str(VIP.address), VIP.port, SERVING, source=4002)
    if candidates:
        world.connections.check(change(candidates))
    else:
        world.connections.check_everything()
    assert eventually(lambda: len(entries()) == 1)
    settle(world)
    assert [each.original.source_port for each in entries()] == [4002]
    assert sum(count for _, count in world.found) == 1


def test_no_wait_for_sockets(net: Namespace, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While sockets are searched for in all namespaces, entries of further changes are deleted."""
    monkeypatch.setattr(conntrack_worker, "PASS_TIMES", (0.0,))  # none of the former change's
    go_on, searching = threading.Event(), threading.Event()

    def each_namespace(
        what: Callable[[], SockDiag], cookies: Collection[int]
    ) -> Iterator[SockDiag]:
        searching.set()
        assert go_on.wait(60)
        yield what()

    world.worker.ender.each_namespace = each_namespace
    client = world.remember(world.direct())
    try:
        for source in (4001, 4002):
            tracked(str(VIP.address), VIP.port, REMOVED, source=source)
            world.worker.check(change(GONE))
            assert searching.wait(60)
            assert eventually(lambda: not entries())
    finally:
        go_on.set()
    assert is_ended(client)


def test_again_after_a_while(net: Namespace, world: World) -> None:
    """A packet that had its backend before the change makes its entry after the first search."""
    now, worker = idle_worker(world)
    worker.check(change(GONE))
    assert worker.due > 0, "the flows that send are reported meanwhile"
    while worker.due < math.inf:
        tracked(str(VIP.address), VIP.port, REMOVED)
        now[0] = worker.due
        worker.turn()
        assert not entries()
    assert 0.05 < now[0] < 2


def test_a_change_comes_before_further_passes(world: World) -> None:
    """And of the same change before that, so that one search takes the kernel at most."""
    now, worker = idle_worker(world)
    searched = recorded(worker)
    worker.check(change(GONE))
    now[0] = worker.due
    worker.turn()
    other = StaleCandidates(VIP, (ip_address("10.244.8.9"), 5353))
    v6 = StaleCandidates(VIP6, (ip_address("fd00:244::8"), 5353))
    worker.check(change(v6, other))
    worker.check(change(other))
    now[0] += 1
    while worker.due <= now[0]:
        worker.turn()
    assert searched == [GONE, other, v6, GONE]


def test_reports_of_egress(world: World) -> None:
    """Egress reports datagrams to a removed endpoint until the last search for its entries.

    A change that removes the endpoint again allows as many reports as the first one.
    """
    now, worker = idle_worker(world)
    recorded(worker)
    first, second = (Frontend(ip_address(f"10.244.8.{n}"), 5353, Protocol.UDP) for n in (8, 9))
    later = StaleCandidates(VIP, (second.address, second.port))
    worker.check(change(GONE))
    assert stale_endpoints(world) == {first: MOST_REPORTS}
    now[0] = 0.5
    worker.turn()
    world.maps["stale_endpoints"].write([(first, 0)])
    worker.check(change(GONE, later, StaleCandidates(VIP, None)))
    assert stale_endpoints(world) == {first: MOST_REPORTS, second: MOST_REPORTS}
    for now[0] in (1.4, 1.6):
        assert len(stale_endpoints(world)) == 2
        while worker.due <= now[0]:
            worker.turn()
    now[0] = math.inf
    while worker.waiting:
        worker.turn()
    assert not stale_endpoints(world)


def test_reports_that_a_former_agent_asked_for(world: World) -> None:
    """They end when the next agent begins."""
    _, former = idle_worker(world)
    former.check(change(GONE))
    idle_worker(world)
    assert not stale_endpoints(world)


def test_more_endpoints_than_the_map_has_room_for(world: World) -> None:
    """The search deletes the entries of the others."""
    _, worker = idle_worker(world)
    many = [StaleCandidates(VIP, (ip_address("10.244.8.8"), port)) for port in range(1, 5000)]
    worker.check(change(*many))
    assert len(stale_endpoints(world)) == world.maps["stale_endpoints"].spec.entries
    assert len(worker.waiting) == len(many)


def test_a_map_of_removed_endpoints_that_cannot_be_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The searches continue, ``error`` says why, and the endpoints are removed later."""
    now, worker = idle_worker(world)
    searched = recorded(worker)
    worker.check(change(GONE))

    def fail(*_: object) -> None:
        raise KernelError("writing stale_endpoints", errno.ENOMEM, "no memory")

    with monkeypatch.context() as failing:
        failing.setattr(world.maps["stale_endpoints"], "write", fail)
        failing.setattr(world.maps["stale_endpoints"], "delete", fail)
        worker.check(change(StaleCandidates(VIP, (ip_address("10.244.8.9"), 5353))))
        assert "writing stale_endpoints" in (worker.error or "")
        now[0] = 2.0
        for _ in range(4):
            worker.turn()
        assert "writing stale_endpoints" in (worker.error or "")
        assert GONE in searched
    now[0] = math.inf
    while worker.waiting:
        worker.turn()
    assert worker.error is None
    assert not stale_endpoints(world)


def stale_endpoints(world: World) -> dict[Frontend, int]:
    """Return the endpoints whose datagrams egress reports."""
    found = dict(world.maps["stale_endpoints"].items())
    assert world.maps["flow_gate"].get(0).stale_endpoints == len(found)
    return found


def test_many_candidates(world: World) -> None:
    """From some number on all entries are read once instead."""
    now, worker = idle_worker(world)
    searched = recorded(worker)
    many = [StaleCandidates(VIP._replace(port=port), None) for port in range(1, 100)]
    worker.check(change(*many))
    now[0] = worker.due
    worker.turn()
    assert searched == [Whole.STALE]
    assert worker.due > 0


def test_what_endpoints_have_not_answered(world: World) -> None:
    """One search deletes the entries of all endpoints that go meanwhile; the next search waits four
    times as long as this one takes the processor.
    """
    now, cpu, asked = [0.0], [0.0], list[set[Unanswered]]()
    worker = StaleConnectionsWorker(world.maps, clock=lambda: now[0], cpu_clock=lambda: cpu[0])
    gone = [Unanswered(Protocol.TCP, (ip_address("10.244.8.8"), port)) for port in range(3)]

    def delete(wanted: Iterable[Unanswered]) -> None:
        if found := {*wanted}:
            asked.append(found)
            cpu[0] += 0.5

    worker.entries.delete_unanswered = delete  # type: ignore[method-assign]
    for each in gone[:2]:
        worker.check([BackendChange(NAME, frozenset(), unanswered=frozenset({each}))])
    now[0] = worker.due
    worker.turn()
    worker.check([BackendChange(NAME, frozenset(), unanswered=frozenset({gone[2]}))])
    begun, now[0] = now[0], worker.due
    assert now[0] == begun + 2
    worker.turn()
    assert asked == [{*gone[:2]}, {*gone}]
    now[0] = worker.due
    worker.turn()
    assert asked[2:] == [{gone[2]}]
    assert worker.due == math.inf
    assert not world.found


def test_what_has_failed_is_made_again(world: World) -> None:
    """With pauses that grow to a minute, or after the next search that succeeds."""
    now, worker = idle_worker(world)

    def fail(_: StaleCandidates) -> Counts:
        raise NodeError("conntrack cannot be listed")

    worker.entries.delete = fail  # type: ignore[assignment, method-assign]
    worker.check(change(GONE))
    now[0] += 1
    pauses = []
    for _ in range(8):
        worker.turn()
        pauses.append(worker.due - now[0])
        now[0] = worker.due
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert worker.error == "conntrack cannot be listed"
    now[0] -= 20
    searched = recorded(worker)
    other = StaleCandidates(VIP, (ip_address("10.244.8.9"), 5353))
    worker.check(change(other))
    now[0] = worker.due
    worker.turn()
    assert worker.error is None
    worker.turn()
    assert searched == [other, GONE]


def idle_worker(world: World) -> tuple[list[float], StaleConnectionsWorker]:
    """Return a worker without a thread; its time is the element of the list."""
    now = [0.0]
    return now, StaleConnectionsWorker(world.maps, clock=lambda: now[0])


def recorded(worker: StaleConnectionsWorker) -> list[StaleCandidates | Whole]:
    """What it searches for from now on; it finds nothing."""
    searched = list[StaleCandidates | Whole]()

    def delete(candidates: StaleCandidates) -> Counts:
        searched.append(candidates)
        return Counts()

    def delete_all(removed: Collection[Frontend]) -> Counts:
        searched.append(Whole.STALE)
        return Counts()

    worker.entries.delete = delete  # type: ignore[method-assign]
    worker.entries.delete_all = delete_all  # type: ignore[assignment, method-assign]
    return searched


def test_shadow(net: Namespace, world: World) -> None:
    """Nothing of a kube-proxy beside is touched: neither its entries, nor sockets that it serves,
    also those that have no entry any more.
    """
    tracked(str(VIP.address), VIP.port, REMOVED)
    world.maps["cluster_ips"].write([(VIP.address, 1)])
    client, before = world.open(), len(entries())
    client.connect((str(VIP.address), VIP.port))
    world.worker.shadow = world.connections.shadow = True
    world.worker.check(change(GONE))
    assert not stale_endpoints(world)
    world.worker.check_everything()
    settle(world)
    assert len(entries()) == before
    assert client.getpeername() == (str(VIP.address), VIP.port)
    world.worker.shadow = world.connections.shadow = False
    world.worker.check(change(GONE))
    settle(world)
    assert not entries()
    with pytest.raises(OSError, match="not connected"):
        client.getpeername()


def test_unreadable(
    net: Namespace, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If conntrack cannot be listed that is told, and it is tried again."""
    monkeypatch.setattr(conntrack_worker, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(world.connections, "pause", 0.01)
    tracked(str(VIP.address), VIP.port, REMOVED)
    with monkeypatch.context() as patched:
        patched.setattr(conntrack, "GET", 99 << 8 | 1)  # of no subsystem
        world.connections.check_everything()
        assert eventually(lambda: world.connections.error)
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
