# SPDX-License-Identifier: Apache-2.0
"""Values as JSON with control characters escaped, and errors as one sentence."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from ebpflb.errors import EbpflbError, NotFound, escaped, in_words, one_line
from ebpflb.redaction import redact

log = logging.getLogger(__name__)


class BadInput(Exception):
    """An invalid request; the text is for the client, ``status`` is a status of HTTP."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def as_shown(value: Any) -> Any:
    """Return the value with all text escaped, also field names, as in the tables of commands."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {as_shown(key): as_shown(it) for key, it in value.items()}
    if isinstance(value, list):
        return [as_shown(it) for it in value]
    return value


def as_json(value: Any, status: int = 200) -> Response:
    """Return a value as a JSON response."""
    body = msgspec.json.encode(as_shown(msgspec.to_builtins(value)))
    return Response(body, status, media_type="application/json")


def as_error(error: BaseException) -> Response:
    """Return a response for an error.

    400 for bad input, 404 for an unknown name, 503 for values that cannot be read now, 500 for a
    bug.
    """
    return as_json({"error": sentence(error)}, status_of(error))


def status_of(error: BaseException) -> int:
    if isinstance(error, BadInput):
        return error.status
    if isinstance(error, NotFound):
        return 404
    return 503 if isinstance(error, EbpflbError | OSError) else 500


def sentence(error: BaseException) -> str:
    """Return an error as a sentence for the operator; a bug is logged with its traceback."""
    if isinstance(error, BadInput | EbpflbError | OSError):
        return redact(one_line(in_words(error)))
    log.error("an error of ebpflb ui itself", exc_info=error)
    return "internal error, described in ebpflb's log: please report it"


# Threads in which requests read, so that a slow reading does not delay other clients.
#
# A limited number reads at a time; a request that has waited for WAIT_SECONDS is refused. A reading
# that takes longer than READ_SECONDS is given up: its thread cannot be ended, so another one takes
# its place.


WAIT_SECONDS = READ_SECONDS = 30.0
MOST_HUNG = 16  # threads that were given up and have not ended

_Value = TypeVar("_Value")


class Workers:
    """Runs at most ``threads`` readings at a time, while ``waiting`` requests may wait."""

    def __init__(self, threads: int, waiting: int, busy: str) -> None:
        self._free = asyncio.Semaphore(threads)
        self._most, self._now, self._busy = threads + waiting, 0, busy
        self._hung: set[threading.Thread] = set()

    async def run(self, function: Callable[[], _Value]) -> _Value:
        """Run the function and return its result.

        Raises the function's exception, or BadInput with status 503 if it takes too long, or too
        many requests wait.
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
        """Return the result. Raises BadInput with status 503 after READ_SECONDS."""
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
    """Start a thread that no one has to join; return it, and a future for the result."""
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
