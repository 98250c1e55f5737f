# SPDX-License-Identifier: Apache-2.0
"""Forgets sockets that are gone though no program was told: the kernel's own (NFS), and MPTCP's.

The hook sock_release is called for sockets of processes alone. A socket that the kernel does not
list in two sweeps in a row is forgotten by a program (bpf/hooks/socket_end.c), which counts its
connections as closed. The kernel lists sockets by network namespace: those of one that this agent
has never entered are left alone.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from struct import Struct

from ebpflb.datapath.attach.netns_cookie import by_socket
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.layout import MAPS, ffi
from ebpflb.datapath.maps.sweep import SWEEP_PAUSE_FACTOR, SWEEP_SLICE
from ebpflb.datapath.programs import compiler, loader, precompile, testrun
from ebpflb.errors import in_words
from ebpflb.model.services import Protocol
from ebpflb.node.namespaces import Namespaces
from ebpflb.node.sock_diag import SockDiag

log = logging.getLogger(__name__)

_SWEEP_INTERVAL = 300.0  # seconds
_PAUSE = 0.002  # seconds after each slice of 0.2 ms

_KEY = Struct("=Q")
_NETNS_AT = ffi.offsetof("struct socket_entry", "netns")
_NETNS = Struct(f"={_NETNS_AT}xQ{MAPS['sockets'].value_size - _NETNS_AT - 8}x")
_LINK_HEADER = bytes(14)

_Opened = tuple[int | None, SockDiag]
_EachNamespace = Callable[[Callable[[], _Opened]], Iterator[tuple[bool, _Opened]]]


def _open() -> _Opened:
    """Of the namespace that the calling thread is in: its cookie (5.14), and what lists it."""
    return by_socket(), SockDiag()


class UnreleasedSockets:
    """Sweeps every _SWEEP_INTERVAL in a thread, from ``start`` to ``stop``.

    ``cache``: of compiled bytecode. The program is loaded when there is something to forget.
    """

    def __init__(
        self,
        maps: Mapping[str, Map],
        cache: Path,
        each_namespace: _EachNamespace | None = None,
    ) -> None:
        self._maps, self._cache = maps, cache
        self._each_namespace = each_namespace or Namespaces().each
        self._entered: set[int] = set()  # cookies of namespaces
        self._missed: set[int] = set()  # by the last sweep
        self._full = (0, 0)
        self._program: int | None = None
        self._error: str | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sockets", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when no map is in use any more."""
        self._stopped.set()
        if self._thread.ident:
            self._thread.join()
        if self._program is not None:
            os.close(self._program)
            self._program = None

    def sweep(self) -> int:
        """How many sockets were forgotten.

        Raises CompileError, VerifierError or KernelError (the kernel cannot list sockets).
        """
        remembered = dict(self._remembered())
        missing = self._missing(remembered) if remembered else set()
        if self._stopped.is_set():
            return 0
        gone, self._missed = missing & self._missed, missing
        for socket in gone:
            self._forget(socket)
        return len(gone)

    def _run(self) -> None:
        while not self._stopped.wait(_SWEEP_INTERVAL):
            try:
                self._tell_full()
                if gone := self.sweep():
                    log.info("%d sockets were forgotten that the kernel does not release", gone)
                self._error = None
            except Exception as error:  # the next sweep tries again
                text = in_words(error)
                if text != self._error:
                    log.error("sockets that the kernel does not release stay remembered: %s", text)
                self._error = text

    def _tell_full(self) -> None:
        now = tuple(self._maps["sockets_full"].get(0))
        if now != self._full:
            log.warning("map sockets was full: %d connections, %d UDP flows not remembered", *now)
        self._full = now

    def _remembered(self) -> Iterator[tuple[int, int]]:
        """The cookie of each socket, and of its network namespace."""
        for keys, values in self._maps["sockets"].slices(SWEEP_SLICE):
            for (socket,), (netns,) in zip(
                _KEY.iter_unpack(keys), _NETNS.iter_unpack(values), strict=True
            ):
                yield socket, netns
            if self._stopped.wait(_PAUSE * SWEEP_PAUSE_FACTOR):
                return

    def _missing(self, remembered: Mapping[int, int]) -> set[int]:
        """Those that the kernel does not list. A namespace that is no longer there has none."""
        listed: dict[int, set[int]] = {}
        for _, (cookie, diag) in self._each_namespace(_open):
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

    def _forget(self, socket: int) -> None:
        if self._program is None:
            compiled = compiler.compile_source(precompile.SOCKET_END, cache=self._cache)
            self._program = loader.load(compiled, self._maps)[0].fd
        testrun.run(self._program, _LINK_HEADER + _KEY.pack(socket))
