# SPDX-License-Identifier: Apache-2.0
"""Servers with a queue, and their clients, a program of its own; the standard library alone.

queue_program.py serve PORT MS               answers one connection after the other, MS
                                             milliseconds each; the others wait
queue_program.py load ADDRESS PORT RATE SECONDS SEED
                                             connects RATE times a second on average, at random
                                             times that no answer delays; prints the
                                             milliseconds of each, from connect to the answer
"""

import asyncio
import json
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

TIMEOUT = 10.0  # seconds


def serve(port: str, milliseconds: str) -> None:
    """Serve for ever; print "ready" when it listens."""
    listener = socket.create_server(("", int(port)), backlog=4096)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        time.sleep(float(milliseconds) / 1000)
        with suppress(OSError):
            connection.sendall(b"!")
        connection.close()


async def _once(address: str, port: int) -> float:
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection(address, port)
    await reader.read(1)
    took = time.monotonic() - begun
    writer.close()
    return took * 1000


async def _load(address: str, port: int, rate: float, seconds: float, seed: int) -> list[float]:
    drawn, at, running = random.Random(seed), time.monotonic(), []
    end = at + seconds
    while (at := at + drawn.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        running.append(asyncio.create_task(asyncio.wait_for(_once(address, port), TIMEOUT)))
    return list(await asyncio.gather(*running))


def load(address: str, port: str, rate: str, seconds: str, seed: str) -> None:
    """Send the load. Raises the error of the first connection that fails."""
    took = asyncio.run(_load(address, int(port), float(rate), float(seconds), int(seed)))
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"serve": serve, "load": load}
    commands[sys.argv[1]](*sys.argv[2:])
