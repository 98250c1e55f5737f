# SPDX-License-Identifier: Apache-2.0
"""Connections are ended between two requests, and never within one, by real sockets."""

import ctypes
import errno
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpflb.entries.services import Frontend
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import PeerFrontend, QuietSocket, SocketEntry
from ebpflb.kernel.quiet_sockets import ENDED, MAP, READY, ClientSocket, QuietSockets
from ebpflb.model.services import Protocol
from tests.kernel.maps.small import small_maps
from tests.kernel.variants import eventually, needs_root
from tests.kit import needs
from tests.load import scaled

pytestmark = needs_root
NAMES = MAP, "failed_openings", "socket_places", "sockets"
IDLE = 0.05  # seconds
USED = READY - 1
REQUEST, RESPONSE = b"POST / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"
BODY = b"{}"
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # Linux's numbers; Python has no names for them
LOST = {errno.ECONNABORTED, errno.EPIPE, errno.ECONNRESET}


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    needs.sock_destroy()


class Connection:
    """A client's connection to a server, and what the program knows of it."""

    def __init__(self, quiet: QuietSockets, stack: ExitStack, family: int = socket.AF_INET) -> None:
        self.quiet = quiet
        with socket.create_server(("", 0), family=family) as listener:
            self.client = stack.enter_context(socket.socket(family))
            self.client.connect(
                ("::1" if family == socket.AF_INET6 else "127.0.0.1", *listener.getsockname()[1:2])
            )
            self.server = stack.enter_context(listener.accept()[0])
        for each in (self.client, self.server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.settimeout(10)
        self.cookie = int.from_bytes(self.client.getsockopt(socket.SOL_SOCKET, 57, 8), "little")

    def asks(self) -> None:
        """The client sends a request, and the server's process reads it."""
        self.client.sendall(REQUEST)
        assert self.server.recv(99) == REQUEST

    def exchange(self) -> None:
        self.asks()
        self.server.sendall(RESPONSE)
        assert self.client.recv(99) == RESPONSE

    def watch(self, idle: float = IDLE) -> None:
        """Watch it, and wish its end."""
        self.quiet.watch({self.cookie: idle})
        self.quiet.want_ended(self.quiet.states(), wanted=True)

    def look(self) -> int:
        """Let the program look once; return its verdict."""
        self.quiet.look([0])
        return self.quiet.states()[self.cookie].state

    def until(self, state: str) -> None:
        number = layout.ffi.typeof("enum quiet_state").relements[f"QUIET_{state}"]
        assert eventually(lambda: self.look() == number)

    def used(self, idle: float = IDLE) -> None:
        """Bring it so far that it ends when it is idle next."""
        self.exchange()
        self.watch(idle)
        self.until("ONCE")
        self.exchange()
        self.until("USED")

    def stays(self, seconds: float = 4 * IDLE) -> bool:
        """Whether it is not ended, for several times as long as it has to be idle."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.look() == ENDED:
                return False
            time.sleep(IDLE / 10)
        return self.client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


@pytest.fixture(scope="module")
def maps() -> Iterator[dict[str, Map]]:
    with small_maps(NAMES) as made:
        yield made


@pytest.fixture(scope="module")
def quiet(maps: dict[str, Map], cache: Path) -> Iterator[QuietSockets]:
    made = QuietSockets(maps, cache, lambda make, _: iter([make()]))
    made.load()
    yield made
    made.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_between_two_requests_is_ended(
    quiet: QuietSockets, stack: ExitStack, family: int
) -> None:
    """Its owner is told at once, also while it waits, and the server is reset."""
    connection = Connection(quiet, stack, family)
    connection.used()
    found: list[int | None] = []

    def wait() -> None:
        try:
            connection.client.recv(1)
        except OSError as error:
            found.append(error.errno)

    waiting = threading.Thread(target=wait)
    waiting.start()
    connection.until("ENDED")
    waiting.join()
    assert found == [errno.ECONNABORTED]
    with pytest.raises(ConnectionResetError):
        connection.server.recv(1)


class Situation(NamedTuple):
    """What happens to a connection that may end when it is idle, and how it goes on."""

    happens: Callable[[Connection], None]
    goes_on: Callable[[Connection], None]


def answers(connection: Connection) -> None:
    connection.server.sendall(RESPONSE)
    assert connection.client.recv(99) == RESPONSE


def is_silent(connection: Connection) -> None:
    """A response that takes long: the server has read the request."""
    connection.asks()


def is_unread(connection: Connection) -> None:
    """The server's kernel has acknowledged the request, and its process has not read it."""
    connection.client.sendall(REQUEST)


def reads_and_answers(connection: Connection) -> None:
    assert connection.server.recv(99) == REQUEST
    answers(connection)


def transacts(connection: Connection) -> None:
    """A transaction is open: the server has answered, and the client has gone on since (COPY)."""
    connection.client.sendall(b"BEGIN; COPY account FROM STDIN;")
    assert connection.server.recv(99)
    connection.server.sendall(b"COPY 0")
    assert connection.client.recv(99) == b"COPY 0"
    connection.client.sendall(b"1\t100\n")
    assert connection.server.recv(99) == b"1\t100\n"


def has_a_response(connection: Connection) -> None:
    """The client has not read all of the response yet."""
    connection.asks()
    connection.server.sendall(RESPONSE * 2)
    assert connection.client.recv(len(RESPONSE)) == RESPONSE


def reads(connection: Connection) -> None:
    assert connection.client.recv(99) == RESPONSE


def is_stalled(connection: Connection) -> None:
    """More was sent than the server's process reads: some is not acknowledged."""
    connection.client.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            connection.client.send(bytes(1 << 16))


def has_a_gap(connection: Connection) -> None:
    """HTTP's 100 has come, then the body of a response whose head is lost again and again."""
    connection.asks()
    time.sleep(0.02)  # more than a jiffy
    answers(connection)
    # Load the first byte of data, and drop an "H".
    lines = (0x30, 0, 0, 32), (0x15, 0, 1, ord("H")), (6, 0, 0, 0), (6, 0, 0, 1 << 16)
    lost = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = struct.pack("HP", len(lines), ctypes.addressof(lost))
    connection.client.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    connection.server.sendall(RESPONSE)
    connection.server.sendall(BODY)


def reads_all(connection: Connection) -> None:
    connection.client.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
    whole = RESPONSE + BODY
    assert connection.client.recv(len(whole), socket.MSG_WAITALL) == whole


def nothing(_: Connection) -> None:
    pass


SITUATIONS = {
    "a response that takes long": Situation(is_silent, answers),
    "a request that waits": Situation(is_unread, reads_and_answers),
    "a transaction": Situation(transacts, answers),
    "a response that waits": Situation(has_a_response, reads),
    "an upload that waits": Situation(is_stalled, nothing),
    "a response with a gap": Situation(has_a_gap, reads_all),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_connection_ends_within_a_request(
    quiet: QuietSockets, stack: ExitStack, name: str
) -> None:
    connection = Connection(quiet, stack)
    connection.used()
    SITUATIONS[name].happens(connection)
    assert connection.stays()
    SITUATIONS[name].goes_on(connection)


AT_ONCE = 40  # connections


def test_no_request_is_lost_that_is_sent_at_the_moment_of_the_end(
    quiet: QuietSockets, maps: dict[str, Map], stack: ExitStack
) -> None:
    """Either the client's call fails, and the server gets nothing; or the server gets the request,
    and the client its response. Both happen.
    """
    refused = answered = 0
    while refused + answered < scaled(10_000):
        with ExitStack() as opened:
            batch = [Connection(quiet, opened) for _ in range(AT_ONCE)]
            sent = sent_at_the_end(quiet, maps, batch)
            for each in batch:
                assert received(each.server) == (REQUEST if each.cookie in sent else b"")
                if each.cookie in sent:
                    answers(each)
            answered += len(sent)
            refused += len(batch) - len(sent)
            quiet.watch({})
    assert refused
    assert answered


def sent_at_the_end(quiet: QuietSockets, maps: dict[str, Map], batch: list[Connection]) -> set[int]:
    """Send a request by each connection while they are ended; return which calls succeeded."""
    for each in batch:
        each.exchange()
    maps[MAP].write([(it.cookie, QuietSocket(0, state=USED, ends=1)) for it in batch])
    quiet.look([0])  # notes their numbers: they end when it looks next
    sent, begin = set[int](), threading.Barrier(2)

    def send() -> None:
        begin.wait()
        time.sleep(random.uniform(0, 0.004))  # about as long as a look
        for each in random.sample(batch, len(batch)):
            if was_sent(each.client):
                sent.add(each.cookie)

    sending = threading.Thread(target=send)
    sending.start()
    begin.wait()
    for _ in range(2):  # the second one finds requests that have changed nothing since
        quiet.look([0])
    sending.join()
    return sent


def was_sent(client: socket.socket) -> bool:
    try:
        client.sendall(REQUEST)
    except OSError as error:
        assert error.errno in LOST
        return False
    return True


def received(server: socket.socket) -> bytes:
    try:
        return server.recv(99)
    except ConnectionResetError:
        return b""


def test_other_sockets_stay(quiet: QuietSockets, stack: ExitStack) -> None:
    """Only the sockets that are watched are ended."""
    one, other = Connection(quiet, stack), Connection(quiet, stack)
    other.exchange()
    one.used()
    one.until("ENDED")
    other.exchange()
    quiet.watch({})
    assert not quiet.states()


def test_a_socket_is_known_by_its_endpoint(quiet: QuietSockets, maps: dict[str, Map]) -> None:
    """Not by the backend's id alone, which may have been another Service's before."""
    ends = ip_address("10.0.0.1"), 80
    frontend = Frontend(ip_address("10.96.0.1"), 80, Protocol.TCP)
    maps["sockets"].write([(9, SocketEntry(PeerFrontend(frontend, 7, *ends), 1, netns=5))])
    assert [*quiet.of({7: ends})] == [ClientSocket(9, 7, 5)]
    assert not [*quiet.of({7: (ends[0], 81), 8: ends})]
    maps["sockets"].delete([9])


def test_failures_are_counted_from_the_first_question_on(
    quiet: QuietSockets, maps: dict[str, Map]
) -> None:
    failures = maps["failed_openings"]
    assert quiet.count_failures([7]) == {7: 0}
    failures.write([(7, 2)])
    assert quiet.count_failures([7, 8]) == {7: 2, 8: 0}
    assert quiet.count_failures([]) == {}
    assert not dict(failures.items())
