# SPDX-License-Identifier: Apache-2.0
"""Looks that may fail: what is wrong is told once, and the thread that looks goes on."""

from collections.abc import Callable

from ebpflb.errors import NodeError
from ebpflb.model.events import SourceStatus


class Lookout:
    """Calls ``look``, and reports when that begins to fail and when it has recovered."""

    def __init__(
        self, source: str, look: Callable[[], None], emit: Callable[[SourceStatus], None]
    ) -> None:
        self._source, self._look, self._emit = source, look, emit
        self._trouble: str | None = None

    def __call__(self) -> bool:
        """Whether it went well. Raises nothing: a thread that died of it would be missed later."""
        trouble = None
        try:
            self._look()
        except Exception as error:
            trouble = str(error) if isinstance(error, NodeError | OSError) else repr(error)
        if trouble != self._trouble:
            self._trouble = trouble
            self._emit(SourceStatus(self._source, trouble))
        return trouble is None
