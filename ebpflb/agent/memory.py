# SPDX-License-Identifier: Apache-2.0
"""When Python's cyclic garbage collector runs: all of its policy.

A large cluster's objects are created at the start and stay as long as the agent runs. While they
are created, each full collection would go through all of them and find nothing. So the collector
is off until everything is programmed; then the objects that exist are frozen, and from then on
it only looks at objects that are created later.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def startup() -> Iterator[None]:
    """No collections until ``end_startup``, or until the end of the block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def end_startup() -> None:
    """What exists now is never looked at again. Does nothing from the second call on."""
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
        gc.enable()
