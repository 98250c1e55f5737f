# SPDX-License-Identifier: Apache-2.0
"""Connections that are held for a while: a program of its own; the standard library alone.

held_program.py serve PORT
    says on each TCP connection which of its addresses the client has met, and holds it
held_program.py hold ADDRESS PORT RATE SECONDS SLOW WARM MEASURED
    opens RATE connections a second at random times, and holds each for a random time, SECONDS
    on average, three times as long if it met the address SLOW; prints as JSON how many were
    open at each address, on average, in MEASURED seconds after WARM seconds
"""

import heapq
import json
import random
import resource
import selectors
import socket
import struct
import sys
import time
from collections import defaultdict

FACTOR = 3
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: nothing is left in TIME_WAIT


def serve(port: str) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = socket.create_server(("", int(port)), backlog=4096)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is listener:
                held, _ = listener.accept()
                held.send(held.getsockname()[0].encode())
                waiting.register(held, selectors.EVENT_READ, held)
            else:
                waiting.unregister(key.data)
                key.data.close()


def hold(
    address: str, port: str, rate: str, seconds: str, slow: str, warm: str, measured: str
) -> None:
    begin = time.monotonic() + float(warm)
    end = begin + float(measured)
    ends: list[tuple[float, int]] = []  # when a connection ends, and its descriptor
    held: dict[int, socket.socket] = {}
    sums: defaultdict[str, float] = defaultdict(float)  # seconds of open connections
    due = time.monotonic()
    while due < end:
        closing, number = ends[0] if ends else (end, 0)
        time.sleep(max(0, min(closing, due) - time.monotonic()))
        if ends and closing <= due:
            heapq.heappop(ends)
            held.pop(number).close()
            continue
        due += random.expovariate(float(rate))
        made = socket.create_connection((address, int(port)))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        at = made.recv(64).decode()
        now = time.monotonic()
        until = now + random.expovariate(1 / float(seconds)) * (FACTOR if at == slow else 1)
        sums[at] += max(0.0, min(until, end) - max(now, begin))
        held[made.fileno()] = made
        heapq.heappush(ends, (until, made.fileno()))
    print(json.dumps({at: each / float(measured) for at, each in sums.items()}))


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1] == "serve" else hold(*sys.argv[2:])
