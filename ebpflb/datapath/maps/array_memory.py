# SPDX-License-Identifier: Apache-2.0
"""An array's elements as memory of this process, read and written without a call."""

import mmap


def map_memory(map_fd: int, size: int, *, writable: bool) -> mmap.mmap:
    """The elements of an MMAPABLE array, of ``size`` bytes together (5.5)."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return mmap.mmap(map_fd, whole, mmap.MAP_SHARED, access)
