# SPDX-License-Identifier: Apache-2.0
"""All entries of a map in slices: their keys and their values, packed and joined.

If the kernel has no batch command for a type of map they are read one by one (see ``bpf_map``).
"""

import errno
from collections.abc import Iterator
from itertools import islice
from struct import Struct, pack

from ebpflb.datapath import kernel
from ebpflb.datapath.maps.array_memory import ArrayMemory
from ebpflb.datapath.maps.layout import MapSpec
from ebpflb.errors import KernelError

NO_BATCH = (kernel.ENOTSUPP, errno.EINVAL)

Slices = Iterator[tuple[bytes, bytes]]


def of_hash(fd: int, spec: MapSpec, size: int) -> Slices:
    """Of up to ``size`` entries each. Raises KernelError (ENOSPC) where a bucket holds more."""
    try:
        yield from _batches(fd, spec, size)
    except KernelError as error:
        if error.errno not in NO_BATCH:
            raise
        walk = _walked_items(fd, spec)
        while part := list(islice(walk, size)):
            yield b"".join(key for key, _ in part), b"".join(value for _, value in part)


def of_array(memory: ArrayMemory, spec: MapSpec, stride: int, count: int) -> Slices:
    """Indexes and elements that are not zero, joined, from ``count`` elements at a time."""
    zero, elements = bytes(spec.value_size), element(spec, stride)
    for start in range(0, spec.entries, count):
        part = memory[start * stride : min(start + count, spec.entries) * stride]
        if part.count(0) < len(part):
            found = enumerate(elements.iter_unpack(part), start)
            some = [(index, value) for index, (value,) in found if value != zero]
            keys = pack(f"={len(some)}I", *(index for index, _ in some))
            yield keys, b"".join([value for _, value in some])


def pairs(spec: MapSpec, keys: bytes, values: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a slice."""
    key_size, value_size = spec.key_size, spec.value_size
    for index in range(len(keys) // key_size):
        yield (
            keys[index * key_size : (index + 1) * key_size],
            values[index * value_size : (index + 1) * value_size],
        )


def element(spec: MapSpec, stride: int) -> Struct:
    """One element, without what pads it."""
    return Struct(f"{spec.value_size}s{stride - spec.value_size}x")


def _batches(fd: int, spec: MapSpec, size: int) -> Slices:
    keys, values = bytearray(spec.key_size * size), bytearray(spec.value_size * size)
    cursor, ended = None, False
    while not ended:
        count, cursor = kernel.map_lookup_batch(fd, cursor, keys, values, size)
        ended = cursor is None
        yield bytes(keys[: count * spec.key_size]), bytes(values[: count * spec.value_size])


def _walked_items(fd: int, spec: MapSpec) -> Iterator[tuple[bytes, bytes]]:
    """Where its key was deleted a walk begins again: what was given is passed over.

    It ends after three times as many steps as the map has entries, whatever is deleted meanwhile.
    """
    key = kernel.map_next_key(fd, None, spec.key_size)
    seen: set[bytes] = set()
    for _ in range(3 * spec.entries):
        if key is None:
            return
        if key not in seen:
            seen.add(key)
            value = kernel.map_lookup(fd, key, spec.value_size)
            if value is not None:
                yield key, value
        key = kernel.map_next_key(fd, key, spec.key_size)
