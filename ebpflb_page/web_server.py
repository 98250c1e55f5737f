# SPDX-License-Identifier: Apache-2.0
"""The process of `ebpflb ui`: a socket, uvicorn, and an end for connections that hold it too long.

uvicorn has no time limit for a client that sends its request slowly, or not at all, and none for
one that does not take what is left of a response.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from ebpflb import redaction
from ebpflb.errors import NodeError, in_words
from ebpflb.tools import pins
from ebpflb_page.application import Api, application
from ebpflb_page.guard import Guard
from ebpflb_page.rate_meter import RateMeter
from ebpflb_page.readings import Readings

MOST_CONNECTIONS = 64
IDLE_SECONDS = 15.0  # without a whole request, or with an end that does not come
_HEAD_BYTES = 16_384
_STOP_SECONDS = 2


@dataclass(frozen=True)
class Listen:
    """Where; ``hosts`` are names besides those of this machine, ``token`` is empty or asked for."""

    address: str
    port: int
    hosts: tuple[str, ...] = ()
    token: str = ""


class Reaper:
    """Ends connections that wait for nothing of ours for longer than ``seconds``."""

    def __init__(self, connections: Callable[[], set[Any]], seconds: float = IDLE_SECONDS) -> None:
        self._connections, self._seconds = connections, seconds
        self._idle: dict[Any, float] = {}

    async def run(self) -> None:
        while True:
            self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(self._seconds / 10)

    def look(self, now: float) -> None:
        idle = {it for it in self._connections() if _is_idle(it)}
        self._idle = {it: self._idle.get(it, now) for it in idle}
        for each, since in self._idle.items():
            if now - since >= self._seconds:
                each.transport.abort()


def _is_idle(connection: Any) -> bool:
    """No request of it is being answered; or it is closing, and its client takes nothing."""
    cycle = connection.cycle
    return cycle is None or cycle.response_complete or connection.transport.is_closing()


def serve(readings: Readings, state_dir: Path, listen: Listen, say: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM. Raises NodeError where it cannot listen."""
    redaction.remember(listen.token)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(redaction.Formatter("%(levelname)s %(name)s: %(message)s"))
    api = Api(readings, RateMeter(lambda: pins.pinned_maps(state_dir)))
    opened = listening(listen)
    host = f"[{listen.address}]" if ":" in listen.address else listen.address
    say(f"http://{host}:{opened.getsockname()[1]}/")
    try:
        asyncio.run(server(api, listen).serve([opened]))
    except KeyboardInterrupt:  # uvicorn raises it again when it has ended
        pass
    finally:
        opened.close()


def server(api: Api, listen: Listen) -> uvicorn.Server:
    """Not started yet."""
    inner = application(api)
    made: list[uvicorn.Server] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        reaper = Reaper(lambda: made[0].server_state.connections)
        tasks = [asyncio.create_task(reaper.run()), asyncio.create_task(api.measure())]
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    inner.router.lifespan_context = lifespan
    config = uvicorn.Config(
        Guard(inner, listen.hosts, listen.token),
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=int(IDLE_SECONDS),
        timeout_graceful_shutdown=_STOP_SECONDS,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
    made.append(uvicorn.Server(config))
    return made[0]


def listening(listen: Listen) -> socket.socket:
    """Raises NodeError."""
    family = socket.AF_INET6 if ":" in listen.address else socket.AF_INET
    opened = socket.socket(family)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((listen.address, listen.port))
        opened.listen(MOST_CONNECTIONS)
    except OSError as error:
        opened.close()
        where = f"{listen.address}:{listen.port}"
        raise NodeError(f"--listen {where}: {in_words(error)}") from error
    return opened
