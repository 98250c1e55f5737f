# SPDX-License-Identifier: Apache-2.0
"""When Python's cyclic garbage collector runs, and what malloc(3) keeps: all of the policy.

A large cluster's objects are created at the start and stay as long as the agent runs. While they
are created, each full collection would go through all of them and find nothing. So the collector
is off until everything is programmed; then the objects that exist are frozen, and from then on
it only looks at objects that are created later.
"""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ARENA_MAX, _MMAP_THRESHOLD = -8, -3  # mallopt(3), glibc's alone
_LARGE = 256 << 10  # bytes: a page of a list has more


@contextmanager
def startup() -> Iterator[None]:
    """No collections until ``end_startup``, or until the end of the block."""
    _set_allocator()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def end_startup() -> None:
    """What exists now is never looked at again. Does nothing from the second call on."""
    if not gc.isenabled():
        gc.collect()
        _return_freed_memory()
        gc.freeze()
        gc.enable()


def _set_allocator() -> None:
    """One arena for all threads, and what is large goes back to the kernel when it is freed.

    Else each thread that reads the maps or a list leaves an arena of some megabytes, which is used
    again only by a thread that happens to get it: 4.7 MB for each checkpoint of the history.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose:
        choose(_ARENA_MAX, 1)
        choose(_MMAP_THRESHOLD, _LARGE)


def _return_freed_memory() -> None:
    """glibc keeps what lists and programs took (malloc_trim(3)); other libraries lack the call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
