# SPDX-License-Identifier: Apache-2.0
"""Remove sockets and counted connections from the maps that closed without a hook being called.

Two threads sweep the maps. What two sweeps in a row find unused is removed by a small program, run
by BPF_PROG_TEST_RUN: it deletes the element and counts the end in one call.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from struct import Struct
from typing import ClassVar

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import MAPS, columns, ffi
from ebpflb.kernel.maps.readers import RememberedSockets
from ebpflb.kernel.maps.records import EndedSocket, record
from ebpflb.kernel.maps.sweep import FLOW_MAPS, SWEEP_SLICE
from ebpflb.kernel.node.namespaces import Namespaces, own_cookie
from ebpflb.kernel.node.sock_diag import SockDiag
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import FrameProgram
from ebpflb.model.services import Protocol
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)

SOCKETS_INTERVAL = 300.0  # seconds
RECOUNT_INTERVAL = 10.0
_PAUSE = 0.002  # seconds after each slice of 0.2 ms


class MissedEnds(PeriodicWorker):
    """A thread that calls ``sweep`` every ``seconds``, from ``start`` to ``stop``.

    ``source`` is the program that removes an element; it is loaded when first needed. ``cache``
    holds compiled bytecode. ``reason`` describes for the log the effect of an error.
    """

    name: ClassVar[str]
    seconds: ClassVar[float]
    source: ClassVar[str]
    reason: ClassVar[str]

    def __init__(self, maps: Mapping[str, Map], cache: Path) -> None:
        super().__init__(self.name, self.seconds, failing=self.reason)
        self._maps = maps
        self._program = FrameProgram(self.source, maps, cache)

    @abstractmethod
    def sweep(self) -> int:
        """Sweep once; return the number of ended elements.

        Raises CompileError, VerifierError or KernelError.
        """

    def turn(self) -> None:
        self.sweep()

    def stop(self) -> None:
        """Stop; return when no map is in use any more."""
        super().stop()
        self._program.close()

    def _end(self, key: bytes) -> None:
        self._program.run(key)


_SOCKET_KEY = Struct("=Q")
_ENDED_SOCKET = record("struct ended_socket")
_NETNS = columns("struct socket_entry", netns="Q")

_Opened = tuple[int | None, SockDiag]
_EachNamespace = Callable[[Callable[[], _Opened]], Iterator[_Opened]]


def _open() -> _Opened:
    """Return the cookie of the calling thread's network namespace, and its sock_diag socket.

    The cookie is None before Linux 5.14.
    """
    return own_cookie(), SockDiag()


class UnreleasedSockets(MissedEnds):
    """Forget sockets that the kernel does not release: its own (NFS), and MPTCP's.

    The hook sock_release is called only for sockets of processes. If the kernel does not list a
    socket in two sweeps in a row, a program (bpf/hooks/socket_end.c) forgets it and counts its
    connections as closed. The kernel lists sockets by network namespace: sockets of a namespace
    that this agent has never entered are left alone.
    """

    name, seconds = "sockets", SOCKETS_INTERVAL
    source = precompile.SOCKET_END
    reason = "sockets that were closed without notice cannot be removed from the map"

    def __init__(
        self, maps: Mapping[str, Map], cache: Path, each_namespace: _EachNamespace | None = None
    ) -> None:
        super().__init__(maps, cache)
        self.each_namespace = each_namespace or Namespaces().each
        self._entered: set[int] = set()  # cookies of namespaces
        self._missed: set[int] = set()  # by the last sweep
        self._full = (0, 0)  # connections and UDP flows for which map sockets had no place

    def sweep(self) -> int:
        """Return how many sockets were forgotten.

        Raises what ``MissedEnds.sweep`` raises; KernelError also if sock_diag cannot list sockets.
        """
        self._warn_if_full()
        remembered = dict(self._network_namespaces())
        missing = self._missing(remembered) if remembered else set()
        if self.stopped.is_set():
            return 0
        gone, self._missed = missing & self._missed, missing
        for socket in gone:
            self._end(_ENDED_SOCKET.pack(EndedSocket(socket)))
        if gone:
            log.info("map sockets: %d sockets removed that the kernel no longer has", len(gone))
        return len(gone)

    def _warn_if_full(self) -> None:
        """Log the numbers of the map sockets_full if they have changed."""
        streams, datagrams, _ = self._maps["sockets_full"].get(0)
        now = streams, datagrams
        if now != self._full:
            log.warning(
                "map sockets is full: %d connections and %d UDP flows were not remembered; raise "
                "--map-size sockets=N",
                *now,
            )
        self._full = now

    def _network_namespaces(self) -> Iterator[tuple[int, int]]:
        """Yield the cookie of each socket, and of its network namespace."""
        for keys, values in RememberedSockets(self._maps).slices(SWEEP_SLICE):
            for (socket,), (netns,) in zip(
                _SOCKET_KEY.iter_unpack(keys), _NETNS.iter_unpack(values), strict=True
            ):
                yield socket, netns
            if self.stopped.wait(_PAUSE):
                return

    def _missing(self, remembered: Mapping[int, int]) -> set[int]:
        """Return the sockets that the kernel does not list; a removed namespace has none."""
        listed: dict[int, set[int]] = {}
        for cookie, diag in self.each_namespace(_open):
            with diag:
                if cookie is not None:
                    sockets = (diag.cookies(each) for each in (Protocol.TCP, Protocol.UDP))
                    listed[cookie] = set[int]().union(*sockets)
        self._entered |= listed.keys()
        return {
            socket
            for socket, netns in remembered.items()
            if netns in self._entered and socket not in listed.get(netns, ())
        }


_KEY = Struct(f"{MAPS['connections'].key_size}s")
_NUMBER = columns("struct flow", connection="8s")
_FRONTEND = ffi.sizeof("struct frontend")  # the first part of a socket's entry
_ENTRY = columns("struct socket_entry", peer=f"{_FRONTEND}s", counted="I")
# A key of connections is a socket's cookie and frontend, or a flow's number; the rest is zero.
_END_OF_KEY = bytes(_KEY.size - 8 - _FRONTEND)
_REST_OF_KEY, _NO_NUMBER = bytes(_KEY.size - 8), bytes(8)


class EndedConnections(MissedEnds):
    """End counted connections that no element refers to any more (bpf/core/connection.h).

    If an LRU evicted a socket or a flow, a sweep or ``ebpflb flows`` deleted it, or two CPUs opened
    the same flow at once, an element stays in the map connections. If two sweeps in a row find no
    reference to it, in sockets, assignments or flows, it is ended.
    """

    name, seconds = "ended connections", RECOUNT_INTERVAL
    source = precompile.CONNECTION_END
    reason = "connections that have ended cannot be removed from the counts"

    def __init__(self, maps: Mapping[str, Map], cache: Path) -> None:
        super().__init__(maps, cache)
        self._missed: set[bytes] = set()  # by the last sweep

    def sweep(self) -> int:
        """Return how many connections were ended.

        Raises CompileError, VerifierError or KernelError.
        """
        counted = (_KEY.iter_unpack(keys) for keys, _ in self._slices("connections"))
        missing = {key for part in counted for (key,) in part}
        for name in ("sockets", "assignments", *FLOW_MAPS) if missing else ():
            for keys in self._referenced_keys(name):
                missing.difference_update(keys)
        if self.stopped.is_set():
            return 0
        ended, self._missed = missing & self._missed, missing
        for key in ended:
            self._end(key)
        self._missed -= ended
        return len(ended)

    def _referenced_keys(self, name: str) -> Iterator[Iterable[bytes]]:
        """Yield the keys in connections that elements of this map refer to."""
        for keys, values in self._slices(name):
            if name in FLOW_MAPS:
                numbers = {number for (number,) in _NUMBER.iter_unpack(values)} - {_NO_NUMBER}
                yield (number + _REST_OF_KEY for number in numbers)
            else:
                size = MAPS[name].key_size
                cookies = (keys[at : at + 8] for at in range(0, len(keys), size))
                each = zip(cookies, _ENTRY.iter_unpack(values), strict=True)
                yield (cookie + asked + _END_OF_KEY for cookie, (asked, counted) in each if counted)

    def _slices(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        read = RememberedSockets(self._maps) if name == "sockets" else self._maps[name]
        for part in read.slices(SWEEP_SLICE):
            yield part
            if self.stopped.wait(_PAUSE):
                return
