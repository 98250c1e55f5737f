# SPDX-License-Identifier: Apache-2.0
"""HTTP servers, and clients that keep connections: a program of its own.

http_program.py serve PORT
    answers each request, one in ten after up to SLOWEST seconds; GET /seen: which numbers it has
    had. SIGUSR1: each connection ends with its next response; SIGUSR2: no more. With grpcio also
    gRPC, on the next port
http_program.py CLIENT URL SECONDS
    requests, httpx, aiohttp or grpcio: WORKERS workers, each with a connection of its own, send
    requests with pauses; prints as JSON how many, and which numbers failed, with the errors
"""

import asyncio
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from importlib import import_module
from typing import Any

WORKERS = 24
SHORTEST, LONGEST = 0.1, 5.0  # seconds of a pause
SLOWEST, SLOW = 4.0, 0.1  # seconds of a slow response, and how many are slow
METHOD = "/bench/Echo"


class Server:
    """``seen``: the numbers of the requests that it has had."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.closes = False

    async def serve(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self.drain, True)
        loop.add_signal_handler(signal.SIGUSR2, self.drain, False)
        listening = await asyncio.start_server(self.connection, "", port, backlog=512)
        self.grpc_port = port + 1
        self.start_grpc()
        print("ready", flush=True)
        await listening.serve_forever()

    def drain(self, closes: bool) -> None:
        self.closes = closes
        if closes and self.grpc:
            self.grpc.stop(grace=2 * SLOWEST)
        elif self.grpc:
            self.start_grpc()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length: ")[2].partition("\r\n")[0]
                await reader.readexactly(int(length or 0))
                said = await self.answer(head.split()[1].strip("/"))
                ends = "close" if self.closes else "keep-alive"
                writer.write(f"HTTP/1.1 200 OK\r\nConnection: {ends}\r\n".encode())
                writer.write(f"Content-Length: {len(said)}\r\n\r\n{said}".encode())
                await writer.drain()
                if self.closes:
                    writer.close()

    async def answer(self, number: str) -> str:
        if number == "seen":
            return json.dumps(self.seen)
        self.seen.append(number)
        if random.random() < SLOW:
            await asyncio.sleep(random.uniform(0, SLOWEST))
        return "ok"

    grpc: Any = None

    def start_grpc(self) -> None:
        try:
            grpc: Any = import_module("grpc")
        except ImportError:
            return

        def echo(request: bytes, _: object) -> bytes:
            self.seen.append(request.decode())
            if random.random() < SLOW:
                time.sleep(random.uniform(0, SLOWEST))
            return request

        name, method = METHOD.strip("/").split("/")
        handler = grpc.unary_unary_rpc_method_handler(echo)
        self.grpc = grpc.server(futures.ThreadPoolExecutor(2 * WORKERS))
        generic = grpc.method_handlers_generic_handler(name, {method: handler})
        self.grpc.add_generic_rpc_handlers((generic,))
        self.grpc.add_insecure_port(f"[::]:{self.grpc_port}")
        self.grpc.start()


class Told:
    """What a client's workers have to tell."""

    def __init__(self) -> None:
        self.count = 0
        self.failed: dict[str, str] = {}

    def note(self, number: str, error: BaseException | None = None) -> None:
        self.count += 1
        if error:
            self.failed[number] = f"{type(error).__name__}: {error}"

    def __str__(self) -> str:
        return json.dumps({"count": self.count, "failed": self.failed})


def number() -> str:
    return f"{random.getrandbits(64):x}"


def pause() -> float:
    return random.uniform(SHORTEST, LONGEST)


def in_threads(send: Callable[[int, str], object], seconds: float) -> Told:
    """Each worker sends a request, by its place and the request's number, and pauses."""
    told, end = Told(), time.monotonic() + seconds

    def work(place: int) -> None:
        while time.monotonic() < end:
            time.sleep(pause())
            its, error = number(), None
            try:
                send(place, its)
            except Exception as raised:
                error = raised
            told.note(its, error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(WORKERS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return told


def by_requests(url: str, seconds: float) -> Told:
    import requests

    sessions = [requests.Session() for _ in range(WORKERS)]

    def send(place: int, its: str) -> None:
        sessions[place].post(f"{url}/{its}", data="x", timeout=30).raise_for_status()

    return in_threads(send, seconds)


def by_httpx(url: str, seconds: float) -> Told:
    import httpx

    limits = httpx.Limits(keepalive_expiry=3600)
    clients = [httpx.Client(limits=limits, timeout=30) for _ in range(WORKERS)]

    def send(place: int, its: str) -> None:
        clients[place].post(f"{url}/{its}", content="x").raise_for_status()

    return in_threads(send, seconds)


def by_grpcio(url: str, seconds: float) -> Told:
    grpc: Any = import_module("grpc")
    target, options = url.removeprefix("http://"), [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.insecure_channel(target, options) for _ in range(WORKERS)]
    calls = [each.unary_unary(METHOD) for each in channels]
    return in_threads(lambda place, its: calls[place](its.encode(), timeout=30), seconds)


def by_aiohttp(url: str, seconds: float) -> Told:
    import aiohttp

    told, end = Told(), time.monotonic() + seconds

    async def work() -> None:
        connector = aiohttp.TCPConnector(keepalive_timeout=3600)
        async with aiohttp.ClientSession(connector=connector) as session:
            while time.monotonic() < end:
                await asyncio.sleep(pause())
                its, error = number(), None
                try:
                    async with session.post(f"{url}/{its}", data="x") as response:
                        await response.read()
                except Exception as raised:
                    error = raised
                told.note(its, error)

    async def all_workers() -> None:
        await asyncio.gather(*(work() for _ in range(WORKERS)))

    asyncio.run(all_workers())
    return told


CLIENTS: dict[str, Callable[[str, float], Told]] = {
    "requests": by_requests,
    "httpx": by_httpx,
    "aiohttp": by_aiohttp,
    "grpcio": by_grpcio,
}

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(Server().serve(int(sys.argv[2])))
    else:
        print(CLIENTS[sys.argv[1]](sys.argv[2], float(sys.argv[3])))
