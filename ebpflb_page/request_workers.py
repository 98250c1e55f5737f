# SPDX-License-Identifier: Apache-2.0
"""Threads in which requests read, so that no reading holds up another client.

A limited number reads at a time; a request that has waited for WAIT_SECONDS is told to come again.
A reading that takes longer than READ_SECONDS is given up: its thread cannot be ended, so another
one takes its place.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ebpflb_page.answering import BadInput

WAIT_SECONDS = READ_SECONDS = 30.0
MOST_HUNG = 16  # threads given up that have not ended

_Value = TypeVar("_Value")


class Workers:
    """At most ``threads`` readings at a time, and ``waiting`` requests that wait for one."""

    def __init__(self, threads: int, waiting: int, busy: str) -> None:
        self._free = asyncio.Semaphore(threads)
        self._most, self._now, self._busy = threads + waiting, 0, busy
        self._hung: set[threading.Thread] = set()

    async def run(self, function: Callable[[], _Value]) -> _Value:
        """What it returns or raises. Raises BadInput with status 503 if it takes too long, or too
        many wait.
        """
        if self._now >= self._most:
            raise BadInput(self._busy, 503)
        self._now += 1
        try:
            await self._turn()
            try:
                return await self._read(function)
            finally:
                self._free.release()
        finally:
            self._now -= 1

    async def _turn(self) -> None:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise BadInput(self._busy, 503) from None

    async def _read(self, function: Callable[[], _Value]) -> _Value:
        """Raises BadInput with status 503 after READ_SECONDS."""
        self._hung = {thread for thread in self._hung if thread.is_alive()}
        if len(self._hung) >= MOST_HUNG:
            raise BadInput(f"{MOST_HUNG} earlier requests hang: restart `ebpflb ui`", 503)
        thread, started = _started(function)
        answer = asyncio.wrap_future(started)
        done, _ = await asyncio.wait([answer], timeout=READ_SECONDS)
        if not done:
            answer.cancel()
            self._hung.add(thread)
            raise BadInput(f"no answer within {READ_SECONDS:g} s: given up", 503)
        return answer.result()


def _started(function: Callable[[], _Value]) -> tuple[threading.Thread, "Future[_Value]"]:
    """A thread for which nothing waits at the end, and what the function returns or raises."""
    answer: Future[_Value] = Future()
    answer.set_running_or_notify_cancel()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=call, name="ui", daemon=True)
    thread.start()
    return thread, answer
