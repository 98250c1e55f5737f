# SPDX-License-Identifier: Apache-2.0
"""Values that programs lock: the kernel must be told of their type (Documentation/bpf/btf.rst).

It finds the lock by the name of its struct, bpf_spin_lock, and lets programs do nothing else to it.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from ebpflb.datapath import kernel

LOCKED = "struct rotation"  # bpf/layout/service.h: a lock and two numbers
_NO_TYPES = (0, 0, 0)
_INT, _STRUCT = 1 << 24, 4 << 24  # kinds, in a type's info; below them the number of members
_BITS = 32  # of each number
_STRINGS = b"\0__u32\0bpf_spin_lock\0rotation\0lock\0cluster\0local\0"


def _name(text: str) -> int:
    return _STRINGS.index(b"\0" + text.encode() + b"\0") + 1


def _btf() -> bytes:
    """Types 1 to 3: the number, the lock, and the value."""
    words = [_name("__u32"), _INT, 4, _BITS]
    words += [_name("bpf_spin_lock"), _STRUCT | 1, 4, _name("lock"), 1, 0]
    words += [_name("rotation"), _STRUCT | 3, 12]
    words += [_name("lock"), 2, 0, _name("cluster"), 1, _BITS, _name("local"), 1, 2 * _BITS]
    types = struct.pack(f"={len(words)}I", *words)
    sizes = (0, len(types), len(types), len(_STRINGS))
    return struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, *sizes) + types + _STRINGS


@contextmanager
def types_of(value: str) -> Iterator[tuple[int, int, int]]:
    """For ``kernel.map_create``: of a map whose key is a number. Raises KernelError."""
    if value != LOCKED:
        yield _NO_TYPES
        return
    types = kernel.btf_load(_btf())
    try:
        yield types, 1, 3
    finally:
        os.close(types)
