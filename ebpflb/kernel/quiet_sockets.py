# SPDX-License-Identifier: Apache-2.0
"""TCP sockets that are ended between two requests, by a program of the kernel's iterator.

bpf/hooks/quiet_socket.c looks at the sockets in map quiet_sockets, and ends those that it may,
under each socket's lock. It goes through all sockets of a network namespace, which takes 2 ms for
few: the kernel has one table of sockets for all namespaces.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from ebpflb.kernel import bpf
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import columns, ffi, names
from ebpflb.kernel.maps.readers import RememberedSockets
from ebpflb.kernel.maps.records import PeerFrontend, QuietSocket, record
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol

MAP, FAILURES = "quiet_sockets", "failed_openings"
_STATES = {name: number for number, name in names("quiet_state", "QUIET_").items()}
READY, ENDED = _STATES["ready"], _STATES["ended"]
_PEER = record("struct peer_frontend")
_ENTRY = columns("struct socket_entry", peer=f"{ffi.sizeof('struct peer_frontend')}s", netns="Q")
# Calls a function in the network namespaces with these cookies (node.namespaces).
EachNamespace = Callable[[Callable[[], int], Collection[int]], Iterator[int]]


class ClientSocket(NamedTuple):
    """A socket that has a TCP connection by a Service: its cookie, backend and namespace."""

    cookie: int
    backend: int
    netns: int


class QuietSockets:
    """For one thread.

    Raises KernelError; ``load`` also NodeError, CompileError and VerifierError.
    """

    def __init__(self, maps: Mapping[str, Map], cache: Path, each_namespace: EachNamespace) -> None:
        self._maps, self._cache, self._each_namespace = maps, cache, each_namespace
        self._link: int | None = None

    @cached_property
    def out_of_reach(self) -> str | None:
        """Which sockets cannot be ended, and why."""
        can_enter = "CAP_SYS_ADMIN" in namespaces.capabilities()
        return None if can_enter else "those of pods, as CAP_SYS_ADMIN is missing"

    def load(self) -> None:
        """Load the program, unless it is."""
        if self._link is None:
            self.watch({})  # what an earlier agent has left
            flags = (precompile.SOCK_DESTROY,)
            compiled = compiler.compile_source(precompile.QUIET_SOCKET, flags, cache=self._cache)
            (program,) = loader.load(compiled, self._maps)
            with bpf.closing(program.fd):
                self._link = bpf.link_create(program.fd, 0, program.attach_type)

    def close(self) -> None:
        """Forget all sockets, and unload the program."""
        self.watch({})
        if self._link is not None:
            os.close(self._link)
            self._link = None

    def of(self, backends: Mapping[int, tuple[Address, int]]) -> Iterator[ClientSocket]:
        """Yield the sockets that have connections to these backends: endpoints by id."""

        @cache
        def backend_of(packed: bytes) -> int:
            peer: PeerFrontend = _PEER.unpack(packed)
            is_tcp = peer.frontend.protocol == Protocol.TCP and peer.is_connected
            is_its = backends.get(peer.backend) == (peer.address, peer.port)
            return peer.backend if is_tcp and is_its else 0

        for cookies, entries in RememberedSockets(self._maps).slices():
            each = zip(memoryview(cookies).cast("Q"), _ENTRY.iter_unpack(entries), strict=True)
            for cookie, (peer, netns) in each:
                if backend := backend_of(peer):
                    yield ClientSocket(cookie, backend, netns)

    def watch(self, idle: Mapping[int, float]) -> None:
        """Watch these sockets, by cookie, until they have been idle for so many seconds."""
        watched = self.states()
        self.forget(watched.keys() - idle.keys())
        wanted = {it: QuietSocket(int(seconds * 1e9)) for it, seconds in idle.items()}
        new = [it for it in wanted if it not in watched or watched[it].idle != wanted[it].idle]
        self._maps[MAP].write([(it, wanted[it]) for it in new])

    def look(self, netns: Iterable[int]) -> None:
        """Run the program over the TCP sockets of these namespaces."""
        link = self._link
        if link is None:
            return
        for iterator in self._each_namespace(lambda: bpf.iterator(link), {*netns}):
            with bpf.closing(iterator):
                _go_through(iterator)

    def states(self) -> dict[int, QuietSocket]:
        """Return what is known of the sockets that are watched."""
        return dict(self._maps[MAP].items())

    def want_ended(self, sockets: Mapping[int, QuietSocket], *, wanted: bool) -> None:
        """Have the program end these sockets when it looks next, or not any more."""
        for cookie, known in sockets.items():
            self._maps[MAP].replace(cookie, known._replace(ends=int(wanted)))

    def forget(self, cookies: Iterable[int]) -> None:
        self._maps[MAP].delete([*cookies])

    def count_failures(self, services: Collection[int]) -> dict[int, int]:
        """Count, from the first call on, connections to these services that do not open.

        Return how many each has had.
        """
        failures = self._maps[FAILURES]
        counted = dict(failures.items())
        failures.delete([*(counted.keys() - {*services})])
        failures.write([(each, 0) for each in {*services} - counted.keys()])
        return {each: counted.get(each, 0) for each in services}


def _go_through(iterator: int) -> None:
    """Read to the end; after a million sockets the kernel pauses (EAGAIN)."""
    while True:
        with suppress(BlockingIOError):
            if not os.read(iterator, 64):
                return
