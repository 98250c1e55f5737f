# SPDX-License-Identifier: Apache-2.0
"""Make calls in parallel, on the cores that this process may use.

bpf(2) is called without Python's lock, and the kernel verifies several programs of a privileged
process at a time, and allocates several maps.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

_MOST_THREADS = 4  # the longest call takes as long as all others in two or three threads


def side_by_side(calls: Iterable[Callable[[], T]], discard: Callable[[T], object]) -> list[T]:
    """Return the results of the calls, in order.

    If a call raises, calls that have not begun are left out, the results of the others are passed
    to ``discard``, and the first error is raised.
    """
    with ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS), "side-by-side") as threads:
        futures = [threads.submit(call) for call in calls]
        wait(futures, return_when=FIRST_EXCEPTION)
        threads.shutdown(cancel_futures=True)
    made = [future for future in futures if not future.cancelled()]
    errors = [error for future in made if (error := future.exception())]
    if errors:
        for future in made:
            if not future.exception():
                discard(future.result())
        raise errors[0]
    return [future.result() for future in futures]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))
