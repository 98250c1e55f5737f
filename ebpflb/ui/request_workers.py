# SPDX-License-Identifier: Apache-2.0
"""Threads in which requests read, so that no reading holds up another client.

So many at a time; who has to wait for longer than WAIT_SECONDS is asked to come again.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ebpflb.ui.answering import BadInput

WAIT_SECONDS = 30.0

_Value = TypeVar("_Value")


class Workers:
    """So many threads, and so many requests that wait for one."""

    def __init__(self, threads: int, waiting: int, busy: str) -> None:
        self._threads = ThreadPoolExecutor(threads, "ui")
        self._most, self._now, self._busy = threads + waiting, 0, busy

    async def run(self, function: Callable[[], _Value]) -> _Value:
        """What it returns or raises. Raises BadInput with status 503 where too many wait."""
        if self._now >= self._most:
            raise BadInput(self._busy, 503)
        self._now += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, function)
        future.add_done_callback(self._ended)
        try:
            return await asyncio.wait_for(asyncio.shield(future), WAIT_SECONDS)
        except TimeoutError:
            raise BadInput(self._busy, 503) from None

    def _ended(self, future: "asyncio.Future[Any]") -> None:
        self._now -= 1
        if not future.cancelled():
            future.exception()  # nobody may wait any more, and asyncio would complain

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
