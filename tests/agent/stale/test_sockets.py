# SPDX-License-Identifier: Apache-2.0
"""Which sockets are ended, where they are searched for, and what the programs remember about
them.
"""

import socket
import weakref
from collections.abc import Callable, Collection, Iterator
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.agent import stale
from ebpflb.entries.services import Backend, Frontend
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.records import Peer, PeerFrontend, SocketEntry
from ebpflb.kernel.node import kube_proxy, sock_diag
from ebpflb.kernel.node.sock_diag import SockDiag
from ebpflb.kernel.stale import ServedFrontends
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.stale import CHANGING, Ends, Stale, Watched
from tests.agent.stale.world import (
    ELSEWHERE,
    HERE,
    OLD,
    SERVICE,
    UDP,
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
NODEPORT = Frontend(ip_address("0.0.0.0"), 30053, UDP)
NODEPORT6 = NODEPORT._replace(address=ip_address("::"))
OF_TCP = VIP._replace(protocol=Protocol.TCP)

pytestmark = [
    needs_root,
    pytest.mark.skipif(not sock_diag.can_destroy(), reason="this kernel ends no sockets"),
]


def test_a_stale_socket_is_ended(world: World) -> None:
    """The translated socket is ended and its entry deleted; sockets without entries stay."""
    client, direct, loose = world.remember(world.direct()), world.direct(), world.open()
    world.end()
    assert is_ended(client)
    settle(world)
    assert error_of(direct) == error_of(loose) == 0
    assert not world.known
    assert (Family.IPV4, 1) in world.found


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
    """The hook's entry for the new connection stays, whenever the owner connects.

    The owner learns of the end at once, and connects again after this many system calls of the
    agent.
    """
    client = world.remember(world.direct())
    ((cookie, _),) = world.maps["sockets"].items()
    world.socket_end.run(bytes(56))  # loaded
    call, made = bpf.bpf, list[int]()
    destroy = SockDiag.destroy

    def watched(*words: Any) -> Any:
        result = call(*words)
        made.append(1)
        if len(made) == calls:
            connect()
        return result

    def connect() -> None:
        monkeypatch.setattr(bpf, "bpf", call)
        world.maps["sockets"].write([(cookie, SocketEntry(connected, SERVICE))])

    def destroyed(self: SockDiag, one: sock_diag.Connected) -> bool:
        monkeypatch.setattr(bpf, "bpf", watched)
        return destroy(self, one)

    monkeypatch.setattr(SockDiag, "destroy", destroyed)
    served = ServedFrontends(world.maps)
    world.worker.sockets.ender.end(Stale(served.endpoints, served.keys, ()), {Protocol.UDP})
    if len(made) < calls:
        connect()
    assert is_ended(client)
    assert world.maps["sockets"].get(cookie).peer == connected


def test_a_socket_that_ipvs_serves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's own socket is left alone while IPVS leads it to an endpoint that serves."""
    run("ip", "address", "add", f"{VIP.address}/32", "dev", "lo")
    world.maps["cluster_ips"].write([(VIP.address, 1)])
    client, virtual = world.open(), (VIP.address, VIP.port)
    client.connect((str(VIP.address), VIP.port))
    own = VIP.address, client.getsockname()[1]
    endpoints = (ELSEWHERE.address, ELSEWHERE.port), (HERE, world.port)
    for to, ends in zip(endpoints, (False, True), strict=True):
        flows = {(own, virtual): to}
        monkeypatch.setattr(kube_proxy, "datagrams_by_ipvs", lambda flows=flows: flows)
        world.end()
        if ends:
            assert is_ended(client)
        else:
            settle(world)
            assert error_of(client) == 0


def test_connected_elsewhere(world: World) -> None:
    """A socket that was connected to another peer in the meantime is left alone."""
    client = world.remember(world.direct())
    client.connect((str(HERE), 1))
    world.end()
    settle(world)
    assert error_of(client) == 0
    assert world.known


@pytest.mark.parametrize(
    "backend",
    [
        Backend(HERE, 0, frozenset({"cluster"}), OLD, SERVICE),
        Backend(HERE, 0, frozenset({"cluster"}), 11, SERVICE),
        Backend(HERE, 0, frozenset(), OLD, SERVICE),
        Backend(ELSEWHERE.address, 0, frozenset({"cluster"}), OLD, SERVICE + 1),
    ],
    ids=["it serves", "by another id", "it terminates", "its slots are another service's"],
)
def test_no_stale_socket(world: World, backend: Backend) -> None:
    """Without a stale socket no namespace is entered, and no socket is ended."""
    world.serve(ELSEWHERE, backend._replace(port=world.port))
    client = world.remember(world.direct())
    world.worker.check_everything()
    settle(world)
    assert world.walks == 0
    assert error_of(client) == 0


def test_an_unconnected_socket_is_not_searched_for(world: World) -> None:
    """The next datagram of an unconnected socket goes to another endpoint anyway."""
    world.remember(world.open(), is_connected=0)
    world.end()
    settle(world)
    assert world.walks == 0


@pytest.fixture
def silence(world: World) -> None:
    drop = f"type filter hook input priority 0; tcp dport {SILENT} drop"
    run("nft", "-f", "-", said=f"table inet t {{\nchain c {{\n{drop}\n}}\n}}\n")


def streams(world: World, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Return two sockets: one waits for its endpoint, the other is open."""
    waits, opens = world.stream(), world.stream()
    for client, port in ((waits, SILENT), (opens, server.getsockname()[1])):
        client.connect_ex((str(HERE), port))
        entry = PeerFrontend(OF_TCP, OLD, HERE, port)
        write_elsewhere(world.maps, cookie_of(client), SocketEntry(entry, SERVICE))
    world.count(OLD, 2, 0)
    return waits, opens


def test_a_connection_that_begins(world: World, silence: None) -> None:
    """A stream socket that waits for a removed endpoint is ended; a socket that is open
    continues.
    """
    with socket.create_server((str(HERE), 0)) as server:
        waits, opens = streams(world, server)
        gone = (HERE, SILENT), (HERE, server.getsockname()[1])
        world.worker.check([removed(*gone, protocol=Protocol.TCP)])
        waits.settimeout(60)
        with pytest.raises(ConnectionAbortedError):
            waits.recv(1)
        settle(world)
        assert has_peer(opens) and error_of(opens) == 0


def test_a_removed_backend_without_sockets_is_not_searched_for(world: World, silence: None) -> None:
    """No search is made if the TCP counters say that no socket uses the backend; with on-removal
    these counters are ignored.
    """
    with socket.create_server((str(HERE), 0)) as server:
        _, opens = streams(world, server)
        world.count(OLD, 2, 2)
        gone = HERE, server.getsockname()[1]
        world.worker.check([removed(gone, protocol=Protocol.TCP)])
        settle(world)
        assert world.walks == 0
        name = PortName("default", "web", "tcp", Protocol.TCP, Family.IPV4)
        world.worker.check((), {name: Watched(0.0, frozenset({OF_TCP}))})
        opens.settimeout(60)
        with pytest.raises(ConnectionAbortedError):
            opens.recv(1)


def test_a_socket_that_was_counted_as_closed(world: World) -> None:
    """Two threads may count a UDP socket as closed twice; the second search still finds it."""
    client = world.remember(world.direct())
    world.count(OLD, 1, 1)
    world.end()
    assert is_ended(client)


def test_only_where_a_stale_socket_is(world: World) -> None:
    """Only the namespaces of stale sockets are entered; if a socket has no entry of its own, all
    namespaces are.
    """
    asked, own = list[Collection[int]](), SocketEntry(world.given, SERVICE, netns=77)

    def each(what: Callable[[], SockDiag], cookies: Collection[int]) -> Iterator[SockDiag]:
        asked.append(cookies)
        yield what()

    world.worker.sockets.ender.each_namespace = each
    world.maps["sockets"].write([(1, own), (2, own._replace(netns=78))])
    world.maps["sockets_full"].write([(0, (0, 0, 2))])
    world.maps["peers"].write([(Peer(3, HERE, world.port), world.given)])
    world.end()
    assert eventually(lambda: asked)
    assert asked[0] == {77, 78, 0}


def test_walk_ends(world: World) -> None:
    """After the last socket is found no other namespace is entered."""
    entered: list[int] = []

    def each(what: Callable[[], SockDiag], cookies: Collection[int]) -> Iterator[SockDiag]:
        for number in range(3):
            entered.append(number)
            yield what()

    world.worker.sockets.ender.each_namespace = each
    client = world.remember(world.direct())
    world.end()
    assert is_ended(client)
    settle(world)
    assert entered == [0]


def test_a_kernel_that_ends_no_sockets(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the kernel cannot end sockets, this is logged once for each protocol, with the effect; no
    search is made.
    """
    monkeypatch.setattr(sock_diag, "can_destroy", lambda _: False)
    worker = stale.StaleWorker(world.maps, world.each, world.socket_end.run)
    world.remember(world.direct())
    worker.start()
    worker.check_everything()
    worker.stop()
    assert world.walks == 0
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert ["UDP" in said[0], "TCP" in said[1], len(said)] == [True, True, 2]
    assert not worker.ends_udp


FRONTENDS = [
    (VIP, VIP, True),
    (VIP, VIP._replace(port=54), False),
    (NODEPORT, NODEPORT._replace(address=ip_address("192.0.2.1")), True),
    (NODEPORT, NODEPORT._replace(address=ip_address("192.0.2.2")), False),
    (NODEPORT, NODEPORT._replace(address=ip_address("127.0.0.1")), True),
    (NODEPORT6, NODEPORT6._replace(address=ip_address("fd00::1")), True),
    (NODEPORT6, NODEPORT._replace(address=ip_address("192.0.2.1")), False),
]


@pytest.mark.parametrize(("served", "asked", "is_served"), FRONTENDS, ids=str)
def test_a_frontend_is_found_as_in_the_datapath(
    world: World, served: Frontend, asked: Frontend, is_served: bool
) -> None:
    """A socket's frontend is found in the same way as in the datapath, NodePorts included."""
    world.maps["services"].delete([VIP])
    world.maps["node_addresses"].write([(ip_address(a), 1) for a in ("192.0.2.1", "fd00::1")])
    world.serve(Backend(HERE, world.port, frozenset({"cluster"}), OLD, SERVICE), frontend=served)
    found = ServedFrontends(world.maps)
    assert (found.endpoints(asked) is not None) == is_served
    assert (served in found.keys(asked)) == is_served


def test_a_slot_of_another_service_tells_nothing(world: World) -> None:
    """If a slot now belongs to another service, the frontend's endpoints are unknown."""
    world.maps["slots"].write([(0, ELSEWHERE._replace(service=SERVICE + 1))])
    assert ServedFrontends(world.maps).endpoints(VIP) is CHANGING


def test_what_a_search_has_read_goes_with_it(world: World) -> None:
    """It is no cycle, which would stay until Python's next full collection."""
    found = ServedFrontends(world.maps)
    assert found.endpoints(VIP) is not None
    kept = weakref.ref(found.endpoints)
    del found
    assert kept() is None


def test_all_are_found_in_a_large_map(world: World) -> None:
    """All stale sockets in a large map are found, and each kind of peer is judged once."""
    judged = list[PeerFrontend]()

    class Judge:
        def ends(self, frontend: Frontend, endpoint: Any, *, is_socket: bool = False) -> Ends:
            judged.append(PeerFrontend(frontend, OLD, *endpoint))
            return Ends.ALL if frontend.protocol == UDP else Ends.NONE

    found = list[int]()

    def each(what: Callable[[], SockDiag], cookies: Collection[int]) -> Iterator[SockDiag]:
        found.extend(cookies)
        yield what()

    world.worker.sockets.ender.each_namespace = each
    stream = PeerFrontend(OF_TCP, OLD, HERE, world.port)
    entries = [(n, SocketEntry((world.given, stream)[n % 2], SERVICE, netns=n)) for n in range(300)]
    world.maps["sockets"].write(entries[1:])
    world.worker.sockets.ender.end(Judge(), {Protocol.UDP, Protocol.TCP})
    assert sorted(found) == list(range(2, 300, 2))
    assert sorted(judged) == sorted([world.given, stream])
