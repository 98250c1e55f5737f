# SPDX-License-Identifier: Apache-2.0
"""A lab and a folder for a benchmark; both are removed at the end, also if it is interrupted."""

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ebpflb.lab.hosts import Lab


@contextmanager
def temporary_lab(prefix: str) -> Iterator[tuple[Lab, Path, ExitStack]]:
    """Yield a lab, a folder, and a stack for what else must be removed at the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{prefix}-")))
        yield stack.enter_context(Lab(prefix)), folder, stack


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Let a thread work, until the event that it gets is set at the end of the block."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def print_step(what: str) -> None:
    """Print what is being measured, to standard error."""
    print(f"{what} ...", file=sys.stderr, flush=True)
