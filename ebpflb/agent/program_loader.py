# SPDX-License-Identifier: Apache-2.0
"""Load this agent's programs, and try again with growing pauses after a failure.

A full disk, a short lack of memory or a killed compiler must not leave a node with old programs for
good. Compiling takes seconds: from the second attempt on a thread does it, so that events are
handled meanwhile, and the programs are then loaded from the cache.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ebpflb.errors import CompileError, KernelError, NodeError, VerifierError
from ebpflb.kernel.datapath import Datapath
from ebpflb.options import Options
from ebpflb.serve.status import CURRENT_PROGRAMS, FORMER_PROGRAMS

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds; each pause is twice the previous one
POLL_SECONDS = 0.2  # while the thread compiles
_FAILURES = (CompileError, VerifierError, KernelError, NodeError)


class ProgramLoader:
    """``status`` is CURRENT_PROGRAMS, or says that old ones serve, and why.

    ``due``: when ``try_again`` has something to do, by the clock; infinity means never.
    """

    def __init__(
        self,
        datapath: Datapath,
        options: Options,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.status = CURRENT_PROGRAMS
        self.due = math.inf
        self._datapath, self._options, self._clock = datapath, options, clock
        self._pause = FIRST_PAUSE
        self._thread: threading.Thread | None = None
        self._first: Future[None] | None = None  # the attempt that ``start`` began

    def start(self) -> None:
        """Begin to load: the kernel verifies programs while the rest of the agent is made."""
        thread = ThreadPoolExecutor(1, "load")
        self._first = thread.submit(self._load)
        thread.shutdown(wait=False)

    def stop(self) -> None:
        """Wait until no thread loads programs any more."""
        if self._first:
            wait([self._first])

    def load(self) -> None:
        """Load the programs at the start, or wait for the attempt that ``start`` began.

        Raises CompileError, VerifierError, KernelError or NodeError if no old ones serve.
        """
        try:
            if self._first:
                self._first.result()
            else:
                self._load()
        except _FAILURES as error:
            if not self._datapath.is_attached():
                raise
            self._fail(error)

    def try_again(self) -> bool:
        """Try to load the programs, when it is due.

        Returns whether they have been loaded now, and must be attached.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile, name="compile", daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            self.due = self._clock() + POLL_SECONDS
            return False
        self._thread = None
        try:
            self._load()
        except _FAILURES as error:
            self._fail(error)
            return False
        return True

    def _compile(self) -> None:
        """Compile into the cache; a failure occurs in ``_load`` again, and is logged there."""
        try:
            self._datapath.compile(self._options.paths.cache)
        except _FAILURES as error:
            log.debug("compiling failed: %s", error)

    def _load(self) -> None:
        self.due = math.inf
        compiled = self._datapath.load(self._options.paths.cache)
        log.info("programs %s", "compiled" if compiled else "from the cache")
        self.status, self._pause = CURRENT_PROGRAMS, FIRST_PAUSE

    def _fail(self, error: Exception) -> None:
        """Note a failure: an earlier agent's programs keep serving."""
        if not self._datapath.programs:
            self.status = f"{FORMER_PROGRAMS}: {str(error).splitlines()[0]}"
        log.error("%s\nthe loaded programs keep serving; trying again in %g s", error, self._pause)
        self._later()

    def _later(self) -> None:
        self.due = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
