# SPDX-License-Identifier: Apache-2.0
"""An array's elements as memory of this process, read and written without a call.

What is mapped counts as the process's memory, whether it uses it or not: all arrays together are
44 MB on two CPUs. So only those parts of an array are mapped that were used last.
"""

import mmap
from collections.abc import Iterator
from threading import Lock
from typing import NamedTuple

PART = 64 << 10  # bytes that are mapped together
PARTS_MAPPED = 8  # of an array, at a time


class _Piece(NamedTuple):
    """A range of bytes within one part."""

    part: mmap.mmap
    start: int
    end: int


class ArrayMemory:
    """The elements of an MMAPABLE array, of ``size`` bytes together (5.5). Safe in any thread.
    Raises ValueError once it is closed.

    ``cpus``: of how many its elements are; a reader of one counter reads that of each.
    """

    def __init__(self, map_fd: int, size: int, *, writable: bool, cpus: int = 1) -> None:
        self._fd, self._count = map_fd, max(PARTS_MAPPED, cpus)
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._parts: dict[int, mmap.mmap] = {}  # by number; the one that was used last is the last
        self._lock = Lock()
        self._is_closed = False  # the descriptor may be another file's by then

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, which: slice) -> bytes:
        with self._lock:
            return b"".join([part[start:end] for part, start, end in self._pieces(which)])

    def __setitem__(self, which: slice, data: bytes) -> None:
        written = 0
        with self._lock:
            for part, start, end in self._pieces(which):
                part[start:end] = data[written : written + end - start]
                written += end - start

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            while self._parts:
                self._parts.popitem()[1].close()

    def _pieces(self, which: slice) -> Iterator[_Piece]:
        at, stop, _ = which.indices(self._size)
        while at < stop:
            number, start = divmod(at, PART)
            end = min(PART, start + stop - at)
            yield _Piece(self._part(number), start, end)
            at += end - start

    def _part(self, number: int) -> mmap.mmap:
        if self._is_closed:
            raise ValueError("the map is closed")
        found = self._parts.pop(number, None)
        if found is None:
            if len(self._parts) >= self._count:
                self._parts.pop(next(iter(self._parts))).close()
            size = min(PART, self._size - number * PART)
            found = mmap.mmap(self._fd, size, mmap.MAP_SHARED, self._access, offset=number * PART)
        self._parts[number] = found
        return found
