# SPDX-License-Identifier: Apache-2.0
"""A check that a thread repeats: an error is reported once, and the thread continues."""

from collections.abc import Callable

from ebpflb.errors import NodeError, in_words
from ebpflb.model.events import SourceStatus


class Poller:
    """Each call runs ``poll``, and emits a SourceStatus when it fails or recovers."""

    def __init__(
        self, source: str, poll: Callable[[], None], emit: Callable[[SourceStatus], None]
    ) -> None:
        self._source, self._poll, self._emit = source, poll, emit
        self._error: str | None = None

    def __call__(self) -> bool:
        """Return whether it succeeded.

        Raises nothing, because the end of the thread would go unnoticed.
        """
        failure = None
        try:
            self._poll()
        except Exception as error:
            failure = in_words(error) if isinstance(error, NodeError | OSError) else repr(error)
        if failure != self._error:
            self._error = failure
            self._emit(SourceStatus(self._source, failure))
        return failure is None
