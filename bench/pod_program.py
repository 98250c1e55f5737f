# SPDX-License-Identifier: Apache-2.0
"""What runs in the pods of a measurement, a program of its own; the standard library alone.

    pod_program.py serve NAME PORT    answers every TCP connection and datagram with NAME
    pod_program.py client             reads a JSON command per line, answers each with a JSON line

Server and client have a CPU each and real-time priority, so that no figure depends on where the
scheduler put them and on what else the machine does.
The client takes CLOCK_MONOTONIC around connect, send and recv; making the socket and closing it
are outside. It closes with SO_LINGER 0, a reset: nothing is left in TIME_WAIT on either side,
and ports never run out.
"""

import gc
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

REQUEST = b"?"
RESET = struct.pack("ii", 1, 0)
TIMEOUT = 3.0  # seconds
PAUSE = 0.0005  # seconds, between two connections of one that waits for a new endpoint

Where = tuple[str, int]


def serve(name: str, port: str) -> None:
    """Serve for ever; print "ready" when it listens."""
    stream = socket.create_server(("", int(port)), backlog=512)
    datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagram.bind(("", int(port)))
    threading.Thread(target=_serve_datagrams, args=(datagram, name), daemon=True).start()
    print("ready", flush=True)
    while True:
        connection, _ = stream.accept()
        try:
            connection.recv(64)
            connection.send(name.encode())
            connection.recv(64)  # the client goes first
        except OSError:
            pass
        connection.close()


def _serve_datagrams(datagram: socket.socket, name: str) -> None:
    while True:
        _, peer = datagram.recvfrom(64)
        datagram.sendto(name.encode(), peer)


def _stream() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return made


def request(where: Where) -> int:
    """Return the nanoseconds from connect to the answer."""
    with _stream() as client:
        begun = time.monotonic_ns()
        client.connect(where)
        client.send(REQUEST)
        client.recv(64)
        return time.monotonic_ns() - begun


def take_turns(targets: list[Where], count: int) -> list[list[int]]:
    """Send ``count`` requests to each target, every other time in reverse order: A B B A A B."""
    took: list[list[int]] = [[] for _ in targets]
    there = list(enumerate(targets))
    back = there[::-1]
    for turn in range(count):
        for index, where in back if turn % 2 else there:
            took[index].append(request(where))
    return took


def scatter(targets: list[Where]) -> None:
    """Begin a connection to each target without waiting for it, and close it."""
    for where in targets:
        with _stream() as client:
            client.setblocking(False)
            client.connect_ex(where)


def send(where: Where, sockets: int, count: int) -> None:
    """Send ``count`` requests from each of ``sockets`` unconnected UDP sockets."""
    for _ in range(sockets):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(TIMEOUT)
            for _ in range(count):
                client.sendto(REQUEST, where)
                client.recvfrom(64)


def send_bursts(where: Where, sockets: int, count: int) -> None:
    """Do as ``send``, but each socket sends all requests before it receives."""
    for _ in range(sockets):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(TIMEOUT)
            for _ in range(count):
                client.sendto(REQUEST, where)
            for _ in range(count):
                client.recvfrom(64)


def name_peer(where: Where, count: int) -> None:
    with _stream() as client:
        client.connect(where)
        for _ in range(count):
            client.getpeername()


def await_end(where: Where) -> int:
    """Connect a UDP socket, print that, and return when the agent has ended it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(where)
        print("true", flush=True)
        try:
            client.recv(64)
        except ConnectionAbortedError:
            return time.monotonic_ns()
        raise AssertionError("an answer, although no endpoint sends any")


def wait_for(where: Where, name: str, pause: float = PAUSE) -> int:
    """Connects until NAME replies, twice in succession; returns the time of the first of these.

    Prints the name that replies before. Once is not enough: conntrack leads a connection from a
    port that another one has just had to the endpoint of that one.
    """
    print(json.dumps(_name(where)), flush=True)
    replied = 0
    while True:
        if _name(where) != name:
            replied = 0
            time.sleep(pause)
        elif replied:
            return replied
        else:
            replied = time.monotonic_ns()


def _name(where: Where) -> str:
    with _stream() as client:
        client.settimeout(TIMEOUT)
        client.connect(where)
        client.send(REQUEST)
        return client.recv(64).decode()


COMMANDS: dict[str, Callable[..., object]] = {
    command.__name__: command
    for command in (take_turns, scatter, send, send_bursts, name_peer, await_end, wait_for)
}


def run() -> None:
    """Run commands until the input ends. JSON has lists of host and port; sockets need tuples."""
    gc.disable()
    for line in sys.stdin:
        command, *words = json.loads(line)
        answer = COMMANDS[command](*map(_tuples, words))
        print(json.dumps(answer), flush=True)


def _tuples(word: object) -> object:
    if not isinstance(word, list):
        return word
    return [tuple(where) for where in word] if isinstance(word[0], list) else tuple(word)


def _pin_to_cpu(place: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[place % len(cpus)]})
    with suppress(
        PermissionError
    ):  # not allowed in a container: the p99 then includes other processes
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", name, port]:
            _pin_to_cpu(1)
            serve(name, port)
        case ["client"]:
            _pin_to_cpu(0)
            run()
        case _:
            sys.exit(__doc__)
