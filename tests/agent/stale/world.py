# SPDX-License-Identifier: Apache-2.0
"""Real sockets on loopback, maps written by hand as the hooks would, and a worker that searches."""

import errno
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from ebpflb.agent.stale import SearchWorker, StaleWorker
from ebpflb.entries.services import NO_SLOT, Backend, Flags, Frontend, Range, ServiceEntry
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.bpf_map import Counters, Map
from ebpflb.kernel.maps.records import PeerFrontend, SocketEntry
from ebpflb.kernel.node.sock_diag import SockDiag
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import FrameProgram
from ebpflb.model.addresses import Address, Family
from ebpflb.model.services import Protocol
from ebpflb.plan.stale import Removal
from ebpflb.workers import DueWorker
from tests.kernel.attach.device_namespace import Namespace
from tests.kernel.maps.small import small_maps, write_elsewhere
from tests.kernel.variants import eventually

NAMES = (
    "socket_places", "sockets", "peers", "services", "slots", "backend_slots", "node_addresses",
    "cluster_ips",
    "backend_stats", "tcp_flows", "other_flows", "flow_gate", "moved_flows",
    "assignments", "connections", "backend_loads", "sockets_full",
)  # fmt: skip
UDP, SERVICE = 17, 7
HERE = ip_address("127.0.0.1")
VIP = Frontend(ip_address("10.96.0.10"), 53, UDP)
ELSEWHERE = Backend(ip_address("10.244.9.9"), 5353, frozenset({"cluster"}), 20, SERVICE)
OLD = 10  # the former backend's id


class World:
    """Maps, sockets, and the worker that ends stale sockets."""

    def __init__(self, made: dict[str, Map], cache: Path) -> None:
        self.maps, self.stack = made, ExitStack()
        self.socket_end = FrameProgram(precompile.SOCKET_END, made, cache)
        self.walks = 0
        self.found: list[tuple[Family, int]] = []
        self.worker = StaleWorker(
            made, self.each, self.socket_end.run, lambda f, _, count: self.found.append((f, count))
        )
        self.backend = self.open()
        self.backend.bind((str(HERE), 0))
        self.port: int = self.backend.getsockname()[1]

    def close(self) -> None:
        self.worker.stop()
        self.socket_end.close()
        self.stack.close()

    def each(self, what: Callable[[], SockDiag], cookies: Collection[int]) -> Iterator[SockDiag]:
        self.walks += bool(cookies)
        yield what()

    def open(self) -> socket.socket:
        return self.stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))

    def stream(self) -> socket.socket:
        """Return a stream socket whose connect() does not wait."""
        made = self.stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        made.setblocking(False)
        return made

    def direct(self) -> socket.socket:
        """Return a socket that is connected to the backend itself."""
        made = self.open()
        made.connect(self.backend.getsockname())
        return made

    def remember(self, one: socket.socket, is_connected: int = 1) -> socket.socket:
        """Remember a socket like the hooks: it asked for VIP and got the backend."""
        given = self.given._replace(is_connected=is_connected)
        write_elsewhere(self.maps, cookie_of(one), SocketEntry(given, SERVICE))
        self.count(OLD, 1, 0)
        return one

    def end(self) -> None:
        """Tell the worker that the endpoint of the remembered sockets is removed."""
        self.worker.check([removed((HERE, self.port))])

    @property
    def given(self) -> PeerFrontend:
        return PeerFrontend(VIP, OLD, HERE, self.port)

    @property
    def known(self) -> set[int]:
        """Return the sockets that the maps connect to a backend."""
        entries = self.maps["sockets"].items()
        return {socket for socket, entry in entries if entry.peer.frontend.port}

    def count(self, backend: int, opened: int, closed: int) -> None:
        stats = self.maps["backend_stats"]
        assert isinstance(stats, Counters)
        packed = struct.pack("=2Q", opened, closed).ljust(stats.size, b"\0")
        bpf.map_update(stats.fd, stats.key.pack(backend), packed)

    def serve(
        self, *backends: Backend, frontend: Frontend = VIP, flags: Flags = frozenset()
    ) -> None:
        """Let only these endpoints serve the frontend, with these flags."""
        self.maps["backend_slots"].write([(id, NO_SLOT) for id in range(64)])
        self.maps["slots"].write(list(enumerate(backends)))
        self.maps["backend_slots"].write([(one.id, slot) for slot, one in enumerate(backends)])
        block = Range(0, len(backends))
        service = ServiceEntry(SERVICE, flags, 0, block.size, block, block)
        self.maps["services"].write([(frontend, service)])


@contextmanager
def made(ns: Namespace, cache: Path) -> Iterator[World]:
    """Yield a world in its own network namespace."""
    ns.run("ip link set lo up")
    with small_maps(NAMES) as opened:
        world = World(opened, cache)
        world.serve(ELSEWHERE)
        world.worker.start()
        try:
            yield world
        finally:
            world.close()


def removed(*endpoints: tuple[Address, int], protocol: Protocol = Protocol.UDP) -> Removal:
    """Return the event that a service port with the frontend VIP lost these endpoints, whose
    backend was OLD.
    """
    frontend = VIP._replace(protocol=protocol)
    return Removal(protocol, {frontend}, {*endpoints}, {OLD}, has_left=True)


def cookie_of(one: socket.socket) -> int:
    return int.from_bytes(one.getsockopt(socket.SOL_SOCKET, 57, 8), "little")


def error_of(one: socket.socket) -> int:
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def has_peer(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True


def is_ended(one: socket.socket) -> bool:
    """Whether the socket is ended soon. The kernel reports the error only once."""
    return eventually(lambda: not has_peer(one)) and error_of(one) == errno.ECONNABORTED


def settle(world: World) -> None:
    """Return when all searches are done and the threads wait for the next change."""

    def is_idle(worker: SearchWorker) -> bool:
        with worker.changed:
            return is_waiting(worker) and not worker.searches

    for each in world.worker.searching:
        assert eventually(partial(is_idle, each))


def is_waiting(worker: DueWorker) -> bool:
    """Whether the worker's thread waits for something to do."""
    return bool(worker.changed._waiters)  # type: ignore[attr-defined]  # noqa: SLF001
