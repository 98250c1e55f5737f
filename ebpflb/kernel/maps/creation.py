# SPDX-License-Identifier: Apache-2.0
"""Create a map as its line in maps.h defines it."""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from ebpflb.kernel import bpf
from ebpflb.kernel.attributes import MAP_FLAGS
from ebpflb.kernel.maps.bpf_map import kernel_entries, kernel_kind
from ebpflb.kernel.maps.layout import MapSpec, ffi


def create_map(spec: MapSpec) -> int:
    """Create a map as defined by its line in maps.h."""
    with lock_types(spec.value) as types:
        return bpf.map_create(
            name=spec.name,
            kind=kernel_kind(spec),
            sizes=(spec.key_size, spec.value_size),
            entries=kernel_entries(spec),
            flags=sum(MAP_FLAGS[flag] for flag in spec.flags),
            types=types,
        )


# Values that programs lock: the kernel must know their type (Documentation/bpf/btf.rst).
#
# The kernel finds the lock by the name of its struct, bpf_spin_lock, and forbids programs any other
# use of it.

LOCKED = ("struct rotation", "struct socket_place")  # each has a field "lock"
_NO_TYPES = (0, 0, 0)
_INT, _STRUCT = 1 << 24, 4 << 24  # kinds, in a type's info; the low bits: number of members
_BITS = 32  # of each number
_STRINGS = b"\0__u32\0bpf_spin_lock\0value\0lock\0"


def _name(text: str) -> int:
    return _STRINGS.index(b"\0" + text.encode() + b"\0") + 1


def _btf(value: str) -> bytes:
    """Return types 1 to 3: the number, the lock, and the value, of which only the lock is named."""
    words = [_name("__u32"), _INT, 4, _BITS]
    words += [_name("bpf_spin_lock"), _STRUCT | 1, 4, _name("lock"), 1, 0]
    words += [_name("value"), _STRUCT | 1, ffi.sizeof(value)]
    words += [_name("lock"), 2, 8 * ffi.offsetof(value, "lock")]
    types = struct.pack(f"={len(words)}I", *words)
    sizes = (0, len(types), len(types), len(_STRINGS))
    return struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, *sizes) + types + _STRINGS


@contextmanager
def lock_types(value: str) -> Iterator[tuple[int, int, int]]:
    """Yield types for ``bpf.map_create``, for a map whose key is a number.

    Raises KernelError.
    """
    if value not in LOCKED:
        yield _NO_TYPES
        return
    types = bpf.btf_load(_btf(value))
    try:
        yield types, 1, 3
    finally:
        os.close(types)
