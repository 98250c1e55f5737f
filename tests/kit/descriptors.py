# SPDX-License-Identifier: Apache-2.0
"""A process with many open files, like an agent on a node with many devices."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

LAST_OF_SELECT = 1023  # FD_SETSIZE - 1


@contextmanager
def beyond_1023() -> Iterator[None]:
    """Give all files that are opened in the block descriptors that select(2) cannot take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * LAST_OF_SELECT), hard))
    taken = [os.open("/dev/null", os.O_RDONLY)]
    try:
        while taken[-1] < LAST_OF_SELECT:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
