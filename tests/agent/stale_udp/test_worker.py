# SPDX-License-Identifier: Apache-2.0
"""When sockets are searched, which are found and ended, and what is logged."""

import errno
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from ebpflb.agent.stale_udp import worker as stale_udp_worker
from ebpflb.agent.stale_udp.worker import StaleSearch, StaleUdpWorker
from ebpflb.entries.services import Backend
from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.records import Peer, PeerFrontend, SocketEntry
from ebpflb.kernel.node import sock_diag
from ebpflb.kernel.node.sock_diag import SockDiag
from ebpflb.model.addresses import Family
from ebpflb.model.services import Protocol
from ebpflb.plan.service_entries import BackendChange
from tests.agent.stale_udp.world import (
    ELSEWHERE,
    HERE,
    NAME,
    OLD,
    REMOVED,
    SERVICE,
    VIP,
    World,
    cookie_of,
    error_of,
    has_peer,
    is_ended,
    removed,
    settle,
)  # fmt: skip
from tests.kernel.maps.small import write_elsewhere
from tests.kernel.node.nodes import run
from tests.kernel.variants import eventually, needs_root

SILENT = 9  # a port whose packets are dropped

pytestmark = [
    needs_root,
    pytest.mark.skipif(not sock_diag.can_destroy(), reason="this kernel ends no sockets"),
]


def test_ended(world: World) -> None:
    """The translated socket is ended and its entry deleted; sockets without entries stay."""
    client, direct, loose = world.remember(world.direct()), world.direct(), world.open()
    world.worker.check(REMOVED)
    assert is_ended(client)
    settle(world)
    assert error_of(direct) == error_of(loose) == 0
    assert not world.known
    assert world.found[:2] == [(Family.IPV4, 1), (Family.IPV6, 0)]


@pytest.mark.parametrize("calls", range(1, 5))
@pytest.mark.parametrize(
    "connected",
    [
        PeerFrontend(VIP, ELSEWHERE.id, ELSEWHERE.address, ELSEWHERE.port),
        PeerFrontend(VIP._replace(port=54), OLD, HERE, 9),
    ],
    ids=["to another backend", "by another frontend"],
)
def test_connected_again_while_it_is_ended(
    world: World, calls: int, connected: PeerFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a hook remembers of the new connection stays, whenever that is.

    The socket's owner is told at once that it was ended, and connects it again while the agent has
    made so many system calls.
    """
    client = world.remember(world.direct())
    ((cookie, own),) = world.maps["sockets"].items()
    stale = Peer(cookie, own.peer.address, own.peer.port)
    world.socket_end.run(bytes(56))  # loaded
    call, made = bpf.bpf, list[int]()

    def watched(*words: Any) -> Any:
        result = call(*words)
        made.append(1)
        if len(made) == calls:
            connect()
        return result

    def connect() -> None:
        monkeypatch.setattr(bpf, "bpf", call)
        world.maps["sockets"].write([(cookie, SocketEntry(connected, SERVICE))])

    monkeypatch.setattr(bpf, "bpf", watched)
    world.worker.ender.end({stale: own.peer})
    if len(made) < calls:
        connect()
    assert is_ended(client)
    assert world.maps["sockets"].get(cookie).peer == connected


def test_connected_elsewhere(world: World) -> None:
    """A socket that has been connected to another peer since is left alone."""
    client = world.remember(world.direct())
    client.connect((str(HERE), 1))
    world.worker.check(REMOVED)
    settle(world)
    assert error_of(client) == 0
    assert world.known


@pytest.mark.parametrize("counters", [(0, 0), (5, 5)])
def test_nobody_holds_it(world: World, counters: tuple[int, int]) -> None:
    """If the counters show that no socket is open, nothing is searched."""
    client = world.remember(world.direct())
    world.count(OLD, *counters)
    world.worker.check(REMOVED)
    settle(world)
    assert world.walks == 0
    assert error_of(client) == 0
    world.worker.check_everything()
    assert is_ended(client)


def test_what_the_counters_miss_is_found_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters that show no open socket, although there is one, only delay the search."""
    monkeypatch.setattr(stale_udp_worker, "EVERYTHING_DELAY", 0.2)
    client = world.remember(world.direct())
    world.count(OLD, 2, 2)
    world.worker.check(REMOVED)
    assert is_ended(client)


def test_no_stale_socket(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no entry is stale, no namespace is entered."""
    world.serve(ELSEWHERE, Backend(HERE, world.port, frozenset({"cluster"}), OLD, SERVICE))
    client = world.remember(world.direct())
    world.worker.check_everything()
    settle(world)
    assert world.walks == 0
    assert error_of(client) == 0


def test_another_id(world: World) -> None:
    """A backend that serves again under another id is not stale."""
    world.serve(Backend(HERE, world.port, frozenset({"cluster"}), 11, SERVICE))
    client = world.remember(world.direct())
    world.worker.check_everything()
    settle(world)
    assert error_of(client) == 0


def test_a_connection_that_begins(world: World) -> None:
    """A stream socket that waits for a removed backend is ended; one that is open goes on."""
    drop = f"type filter hook input priority 0; tcp dport {SILENT} drop"
    run("nft", "-f", "-", said=f"table inet t {{\nchain c {{\n{drop}\n}}\n}}\n")
    with socket.create_server((str(HERE), 0)) as server:
        waits, opens = world.stream(), world.stream()
        for client, port in ((waits, SILENT), (opens, server.getsockname()[1])):
            client.connect_ex((str(HERE), port))
            entry = PeerFrontend(VIP._replace(protocol=Protocol.TCP), OLD, HERE, port)
            write_elsewhere(world.maps, cookie_of(client), SocketEntry(entry, SERVICE))
        world.count(OLD, 2, 0)
        world.worker.check([BackendChange(NAME._replace(protocol=Protocol.TCP), frozenset({OLD}))])
        waits.settimeout(60)
        with pytest.raises(ConnectionAbortedError):
            waits.recv(1)
        settle(world)
        assert has_peer(opens) and error_of(opens) == 0


def test_a_connection_that_begins_by_a_port_that_is_renamed(world: World) -> None:
    """Its endpoint serves the frontend still, by another id: it goes on waiting."""
    drop = f"type filter hook input priority 0; tcp dport {SILENT} drop"
    run("nft", "-f", "-", said=f"table inet t {{\nchain c {{\n{drop}\n}}\n}}\n")
    at, waits = VIP._replace(protocol=Protocol.TCP), world.stream()
    world.serve(Backend(HERE, SILENT, frozenset({"cluster"}), 11, SERVICE), frontend=at)
    waits.connect_ex((str(HERE), SILENT))
    entry = SocketEntry(PeerFrontend(at, OLD, HERE, SILENT), SERVICE)
    write_elsewhere(world.maps, cookie_of(waits), entry)
    world.count(OLD, 1, 0)
    world.worker.check([BackendChange(NAME._replace(protocol=Protocol.TCP), frozenset({OLD}))])
    settle(world)
    assert error_of(waits) == 0


@pytest.mark.parametrize("is_deleted", [False, True], ids=["no endpoint", "no Service"])
def test_no_backend_left(world: World, is_deleted: bool) -> None:
    """A socket is ended with the last backend, whose address a stranger may get."""
    client = world.remember(world.direct())
    if is_deleted:
        world.maps["services"].delete([VIP])
    else:
        world.serve()
    world.worker.check(REMOVED)
    assert is_ended(client)


def test_second_pass(world: World) -> None:
    """A socket that was inside a hook during the first pass is found by the second."""
    client = world.direct()

    def remember(*_: object) -> None:
        world.remember(client)

    world.worker.on_search = remember  # after the first pass
    world.worker.check(REMOVED)
    assert is_ended(client)


def test_late(world: World) -> None:
    """Searches that become due during another one are joined: they find what each would find."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        assert go_on.wait(60)

    world.remember(world.open())
    world.worker.on_search = hold
    world.worker.check(REMOVED)
    assert begun.wait(60)
    client = world.remember(world.direct())
    walks = world.walks
    for number in range(1, 10):
        world.worker.check(removed(OLD + number))
        world.worker.check(REMOVED)
    go_on.set()
    assert is_ended(client)
    settle(world)
    assert world.walks <= walks + 3, "once for all first passes, once for their second ones"


def test_sought_in_vain(world: World) -> None:
    """A stale socket without a peer is searched twice, and not again with others."""
    world.remember(world.open())
    world.worker.check(REMOVED)
    settle(world)
    assert world.walks == 2
    client = world.direct()
    world.worker.check(REMOVED)
    settle(world)
    assert world.walks == 2
    assert len(world.worker.given_up) == 1
    world.maps["sockets"].delete([peer for peer, _ in world.maps["sockets"].items()])
    world.remember(client)
    world.worker.check(REMOVED)
    assert is_ended(client)
    settle(world)
    assert not world.worker.given_up


def test_only_where_a_stale_socket_is(world: World) -> None:
    """The namespaces of stale sockets are asked for; any, if a socket has no entry of its own."""
    asked, own = list[Collection[int]](), SocketEntry(world.given, SERVICE, netns=77)

    def each(what: Callable[[], SockDiag], cookies: Collection[int]) -> Iterator[SockDiag]:
        asked.append(cookies)
        yield what()

    world.worker.ender.each_namespace = each
    world.maps["sockets"].write([(1, own), (2, own._replace(netns=78))])
    world.maps["sockets_full"].write([(0, (0, 0, 2))])
    world.maps["peers"].write([(Peer(3, HERE, world.port), world.given)])
    world.count(OLD, 1, 0)
    world.worker.check(REMOVED)
    assert eventually(lambda: asked)
    assert asked[0] == {77, 78, 0}


def test_walk_ends(world: World) -> None:
    """After the last socket is found no more namespaces are entered."""
    entered: list[int] = []

    def each(what: Callable[[], SockDiag], cookies: Collection[int]) -> Iterator[SockDiag]:
        for number in range(3):
            entered.append(number)
            yield what()

    world.worker.ender.each_namespace = each
    client = world.remember(world.direct())
    world.worker.check(REMOVED)
    assert is_ended(client)
    settle(world)
    assert entered == [0]


@pytest.mark.parametrize("error", [KernelError("map", errno.ENOSPC, "no space"), KeyError("map")])
def test_failure(
    world: World,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """A search that fails is made again, however often, and its reason is told until it succeeds;
    the log has each reason once.
    """
    monkeypatch.setattr(stale_udp_worker, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(world.worker, "pause", 0.01)
    client, slices, asked = world.remember(world.direct()), world.maps["sockets"].slices, [0]

    def refuse(*_words: Any) -> Any:
        asked[0] += 1
        raise error

    world.maps["sockets"].slices = refuse  # type: ignore[assignment, method-assign]
    world.worker.check(REMOVED)
    assert eventually(lambda: asked[0] > 3 and world.worker.error)
    assert "map" in str(world.worker.error)
    world.maps["sockets"].slices = slices  # type: ignore[method-assign]
    assert is_ended(client)
    settle(world)
    assert world.worker.error is None
    assert caplog.text.count("stale UDP sockets cannot be ended: ") == 1


def test_never_started(world: World) -> None:
    """It can be stopped without having been started."""
    StaleUdpWorker(world.maps, world.each, world.socket_end.run).stop()


def test_a_kernel_that_ends_no_sockets(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it lacks is logged once, with its effect, and no socket is searched for."""
    monkeypatch.setattr(sock_diag, "can_destroy", lambda: False)
    worker = StaleUdpWorker(world.maps, world.each, world.socket_end.run)
    worker.start()
    worker.check_everything()
    worker.stop()
    assert not worker.searches
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "connected sockets keep a removed endpoint" in said


def virtual(world: World, fail: bool = True) -> tuple[StaleUdpWorker, list[float]]:
    """A worker without a thread, whose searches fail; its time is the first element."""
    now = [100.0]
    worker = StaleUdpWorker(world.maps, world.each, world.socket_end.run, clock=lambda: now[0])

    def refuse(*_: object) -> Any:
        raise KernelError("map", errno.ENOSPC, "no space")

    worker.search_and_report = refuse  # type: ignore[assignment, method-assign]
    return worker, now


def test_pauses_grow(world: World) -> None:
    """To a minute, and a success makes the next one short again."""
    worker, now = virtual(world)
    worker.check_everything()
    pauses = []
    for _ in range(9):
        worker.turn()
        pauses.append(worker.due - now[0])
        now[0] = worker.due
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    worker.search_and_report = lambda *_: None  # type: ignore[method-assign]
    worker.turn()
    assert worker.error is None and worker.pause == 1


def test_what_has_failed_joins_the_next_search(world: World) -> None:
    """It does not wait for its pause, and nothing of it is forgotten."""
    worker, now = virtual(world)
    worker.check(removed(5))
    for _ in range(6):
        worker.turn()
        now[0] = worker.due
    found = list[StaleSearch]()
    worker.search_and_report = lambda search, begun: found.append(search)  # type: ignore[method-assign]
    now[0] -= 20
    worker.check(removed(6))
    assert worker.due == now[0]
    worker.turn()
    assert [each.backends for each in found] == [frozenset({5, 6})]
    now[0] = worker.due
    worker.turn()
    assert [each.is_first for each in found] == [True, False]
