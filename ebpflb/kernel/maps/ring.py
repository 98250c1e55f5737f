# SPDX-License-Identifier: Apache-2.0
"""A ring buffer of the kernel (Documentation/bpf/ringbuf.rst) whose records have one size.

The pages of its descriptor are: the reader's position, the writers' position, then the data twice,
so that a record that wraps around the end is contiguous too. A record has a header of eight bytes,
whose first word is its length, with a bit that is set while the record is being written.
"""

import mmap
import struct
from contextlib import suppress
from typing import Any

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import ffi

HEADER = 8
_BUSY = 1 << 31  # BPF_RINGBUF_BUSY_BIT
_WORD = 4
_POSITION = struct.Struct("=Q")


class Ring:
    """A reader, for one thread."""

    def __init__(self, opened: Map) -> None:
        """Raises OSError."""
        self._record, self._unpack = ffi.sizeof(opened.spec.value), opened.value.unpack
        self.stride = HEADER + -(-self._record // 8) * 8
        self._fd, self._size = opened.fd, opened.spec.entries
        self._reader = mmap.mmap(opened.fd, mmap.PAGESIZE)
        pages = mmap.PAGESIZE + 2 * self._size
        self._data = mmap.mmap(
            opened.fd, pages, mmap.MAP_SHARED, mmap.PROT_READ, offset=mmap.PAGESIZE
        )
        self._words = memoryview(self._data).cast("I")

    def fileno(self) -> int:
        """Return the descriptor, which is readable when there are records."""
        return self._fd

    def take(self) -> bytes:
        """Return all complete records in order, each with its header.

        The headers are read before their records.
        """
        begin = _POSITION.unpack_from(self._reader)[0]
        end = _POSITION.unpack_from(self._data)[0]
        if begin == end:
            return b""
        at = mmap.PAGESIZE + begin % self._size
        headers = self._words[at // _WORD : (at + end - begin) // _WORD : self.stride // _WORD]
        count = next((i for i, word in enumerate(headers) if word & _BUSY), len(headers))
        taken = self._data[at : at + count * self.stride]
        self._reader[: _POSITION.size] = _POSITION.pack(begin + count * self.stride)
        return taken

    def take_values(self) -> list[Any]:
        """Return all complete records in order, as values of the map's type."""
        taken = self.take()
        begins = range(HEADER, len(taken), self.stride)
        return [self._unpack(taken[begin : begin + self._record]) for begin in begins]

    def close(self) -> None:
        self._words.release()
        for each in (self._data, self._reader):
            with suppress(BufferError):
                each.close()
