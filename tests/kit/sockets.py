# SPDX-License-Identifier: Apache-2.0
"""Sockets on a host of the lab, used from this process.

    sockets = Sockets(pod)
    stream = sockets.open(AF_INET, SOCK_STREAM)
    stream.connect(("10.96.0.10", 80))

A process on the host makes each call and sends back what it returns or raises. That process runs
this file too, which therefore only imports the standard library.
"""

import ctypes
import pickle
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from ebpflb.lab.hosts import Host

CALL_SECONDS = 60.0  # seconds that a call may take, on a machine that is starved


class Sockets:
    """Opens sockets on a host; ``close`` ends the process that holds them, and so closes all of
    them.
    """

    def __init__(self, host: "Host") -> None:
        pipe = subprocess.PIPE
        self.process = host.python(Path(__file__), stdin=pipe, stdout=pipe)
        self.requests: Any = self.process.stdin
        self.answers: Any = self.process.stdout

    def open(self, family: int, kind: int, protocol: int = 0) -> "Socket":
        return Socket(self, self.call(None, "open", (family, kind, protocol)))

    def call(self, number: int | None, method: str, words: tuple[Any, ...]) -> Any:
        """Call a method of a socket on the host; return or raise its result."""
        pickle.dump((number, method, words), self.requests.buffer)
        self.requests.flush()
        answer = pickle.load(self.answers.buffer)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.process.kill()
        with suppress(OSError):
            self.process.communicate()


class Socket:
    """A socket on the host, with the methods of ``socket.socket``, and ``disconnect``."""

    def __init__(self, sockets: Sockets, number: int) -> None:
        self.sockets, self.number = sockets, number

    def __getattr__(self, method: str) -> Any:
        return lambda *words: self.sockets.call(self.number, method, words)

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def accept(self) -> tuple["Socket", Any]:
        number, peer = self.sockets.call(self.number, "accept", ())
        return Socket(self.sockets, number), peer


class _Holder:
    """The sockets by number, held by the process on the host."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    def call(self, number: int | None, method: str, words: tuple[Any, ...]) -> Any:
        if number is None:
            return self._hold(socket.socket(*words))
        if method == "accept":
            connection, peer = self.sockets[number].accept()
            return self._hold(connection), peer
        if method == "disconnect":
            return _disconnect(self.sockets[number])
        return getattr(self.sockets[number], method)(*words)

    def _hold(self, opened: socket.socket) -> int:
        opened.settimeout(CALL_SECONDS)
        self.sockets.append(opened)
        return len(self.sockets) - 1


def _disconnect(opened: socket.socket) -> None:
    """Call connect() with AF_UNSPEC, for which Python's own connect() has no form."""
    size = struct.calcsize("=H14x")
    if ctypes.CDLL(None, use_errno=True).connect(opened.fileno(), bytes(size), size):
        raise OSError(ctypes.get_errno(), "connect to AF_UNSPEC")


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    holder = _Holder()
    while True:
        try:
            answer = holder.call(*pickle.load(requests))
        except EOFError:
            return
        except OSError as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
