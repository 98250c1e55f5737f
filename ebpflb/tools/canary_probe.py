# SPDX-License-Identifier: Apache-2.0
"""One canary connection: a question to the endpoint, and whether its answer is that of doctor's.

The endpoint answers with a word that was drawn for it, so nothing else can be taken for it. The
answer has to come from the address that was asked: else it was translated one way only.
"""

import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ebpflb.errors import NodeError, in_words
from ebpflb.kernel.attach.cgroup_links import cgroup_root
from ebpflb.kernel.node import clients
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol

ENDPOINT_PORT = 8080  # of the endpoint, in a namespace where nothing else listens
_SECONDS = 3.0  # until a connection is given up
_TIMES = 3  # that a datagram is sent in that time
_OWN = Path("/proc/self")
_LONGEST = 64  # bytes of question and answer


class CanaryEndpoint:
    """Answers on ENDPOINT_PORT with its word, in the namespace in which ``call`` calls."""

    def __init__(self, call: Callable[[Callable[[], list[socket.socket]]], list[socket.socket]]):
        self.word = os.urandom(8).hex().encode()
        self._sockets = call(_listening)
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)
        for each in self._sockets:
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="canary", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.write(self._wake, b"\0")
        self._thread.join()
        self._selector.close()
        for each in self._sockets:
            each.close()
        os.close(self._wake)
        os.close(self._woken)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._woken:
                    return
                assert isinstance(key.fileobj, socket.socket)
                with suppress(OSError):
                    self._answer(key.fileobj)

    def _answer(self, asked: socket.socket) -> None:
        if asked.type is socket.SOCK_DGRAM:
            _, client = asked.recvfrom(_LONGEST)
            asked.sendto(self.word, client)
            return
        connection, _ = asked.accept()
        with connection:
            connection.settimeout(_SECONDS)
            if connection.recv(_LONGEST):
                connection.sendall(self.word)


def _listening() -> list[socket.socket]:
    found = []
    for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with suppress(OSError):  # a kernel without IPv6
                made = socket.socket(family, kind)
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                made.bind((anywhere, ENDPOINT_PORT))
                if kind == socket.SOCK_STREAM:
                    made.listen()
                made.setblocking(False)
                found.append(made)
    return found


def fault(protocol: Protocol, address: Address, port: int, word: bytes) -> str:
    """What is wrong with a connection of this thread's namespace; "" if nothing is."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    kind = socket.SOCK_STREAM if protocol is Protocol.TCP else socket.SOCK_DGRAM
    try:
        with socket.socket(family, kind) as client:
            exchange = _stream if protocol is Protocol.TCP else _datagram
            said, by = exchange(client, (str(address), port))
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return in_words(error).lower()
    if said != word:
        return "something else answers"
    if by[:2] != (str(address), port):
        return f"the answer comes from {by[0]}, port {by[1]}"
    return ""


def _stream(client: socket.socket, to: tuple[str, int]) -> tuple[bytes, tuple[str, int]]:
    client.settimeout(_SECONDS)
    client.connect(to)
    client.sendall(b"?")
    said = b""
    while part := client.recv(_LONGEST):
        said += part
    return said, client.getpeername()


def _datagram(client: socket.socket, to: tuple[str, int]) -> tuple[bytes, tuple[str, int]]:
    client.settimeout(_SECONDS / _TIMES)
    for left in reversed(range(_TIMES)):
        client.sendto(b"?", to)
        with suppress(*([TimeoutError] if left else [])):
            return client.recvfrom(_LONGEST)
    raise TimeoutError


@contextmanager
def inside(cgroup: Path) -> Iterator[None]:
    """This process is in that cgroup, as /proc/PID/cgroup has it, or below it. Raises NodeError."""
    if clients.in_cgroup(_OWN, cgroup):
        yield
        return
    root = cgroup_root()
    lines = (_OWN / "cgroup").read_text().splitlines()
    before = next((it[len("0::/") :] for it in lines if it.startswith("0::/")), "")
    try:
        _enter(root / cgroup.relative_to("/"))
    except OSError as error:
        text = f"doctor is outside of {cgroup}, whose sockets are served, and cannot enter it"
        raise NodeError(f"{text}: {in_words(error)}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            _enter(root / before)


def _enter(cgroup: Path) -> None:
    (cgroup / "cgroup.procs").write_text("0")
