# SPDX-License-Identifier: Apache-2.0
"""When the garbage collector runs."""

import ctypes
import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ebpflb.agent import loop


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """What these tests freeze is freed again."""
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_end_of_startup() -> None:
    """Off until the end of the startup; then what exists is left alone, once."""
    with loop.startup():
        assert not gc.isenabled()
        loop.end_startup()
        assert gc.isenabled()
        frozen = gc.get_freeze_count()
        assert frozen
        loop.end_startup()
        assert gc.get_freeze_count() <= frozen


ALLOCATE_IN_THREADS = """
import ctypes, threading
from ebpflb.agent import loop as memory

def allocate():
    held.append(ctypes.create_string_buffer(100_000))
    both.wait()

held, both = [], threading.Barrier(8)
with memory.startup():
    threads = [threading.Thread(target=allocate) for _ in range(8)]
    for each in threads: each.start()
    for each in threads: each.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, out)
libc.fclose(out)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_threads_leave_no_arenas_of_their_own() -> None:
    """A thread that has read the maps, as for a checkpoint, leaves no memory behind."""
    words = [sys.executable, "-c", ALLOCATE_IN_THREADS]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert told.count("<heap nr=") == 1
