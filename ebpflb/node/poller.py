# SPDX-License-Identifier: Apache-2.0
"""Looks that may fail: what is wrong is told once, and the thread that looks goes on."""

from collections.abc import Callable

from ebpflb.errors import NodeError
from ebpflb.model.events import SourceStatus


class Poller:
    """Calls ``poll``, and reports when that begins to fail and when it has recovered."""

    def __init__(
        self, source: str, poll: Callable[[], None], emit: Callable[[SourceStatus], None]
    ) -> None:
        self._source, self._poll, self._emit = source, poll, emit
        self._error: str | None = None

    def __call__(self) -> bool:
        """Whether it went well. Raises nothing: a thread that died of it would be missed later."""
        failure = None
        try:
            self._poll()
        except Exception as error:
            failure = str(error) if isinstance(error, NodeError | OSError) else repr(error)
        if failure != self._error:
            self._error = failure
            self._emit(SourceStatus(self._source, failure))
        return failure is None
