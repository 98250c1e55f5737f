# SPDX-License-Identifier: Apache-2.0
"""The end of the agent: what causes it in a thread, and its steps, of which each is taken."""

import logging
import threading
from collections.abc import Callable

from ebpflb.errors import EbpflbError, in_words, one_line

log = logging.getLogger(__name__)


def run_all(*steps: Callable[[], object], failed: str = "stopping") -> None:
    """In this order. What one of them raises is logged, as ``failed`` and the reason."""
    for step in steps:
        try:
            step()
        except (EbpflbError, OSError) as error:
            log.error("%s: %s", failed, in_words(error))
        except Exception:
            log.exception("%s: unexpected", failed)


class FailedThreads:
    """Ends the process in order when one of its threads ends by an exception.

    Otherwise nothing would show that what the thread watches is no longer watched.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        """``stop`` is called from the thread that fails, from now on."""
        self.name = ""  # the first thread that has failed
        self._stop = stop
        threading.excepthook = self._report

    def _report(self, failure: threading.ExceptHookArgs) -> None:
        name = failure.thread.name if failure.thread else "unknown"
        reason = one_line(f"{failure.exc_type.__name__}: {failure.exc_value}")
        log.critical("thread %s failed, so the agent exits: %s", name, reason)
        where = failure.exc_type, failure.exc_value, failure.exc_traceback
        log.debug("thread %s", name, exc_info=where if failure.exc_value else None)  # type: ignore[arg-type]
        self.name = self.name or name
        self._stop()
