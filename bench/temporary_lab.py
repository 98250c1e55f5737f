# SPDX-License-Identifier: Apache-2.0
"""A lab and a folder for a benchmark; both are removed at the end, also if it is interrupted."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ebpflb.lab.hosts import Lab


@contextmanager
def temporary_lab(prefix: str) -> Iterator[tuple[Lab, Path, ExitStack]]:
    """Yield a lab, a folder, and a stack for what else must be removed at the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{prefix}-")))
        yield stack.enter_context(Lab(prefix)), folder, stack


def print_step(what: str) -> None:
    """Print what is being measured, to standard error."""
    print(f"{what} ...", file=sys.stderr, flush=True)
