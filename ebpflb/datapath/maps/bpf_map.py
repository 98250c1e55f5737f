# SPDX-License-Identifier: Apache-2.0
"""A map as a collection of values: hashes are written in batches, arrays through memory.

If the kernel has no batch command for a type of map (5.10: per-CPU arrays, tries), it returns
ENOTSUPP, and the entries are written one by one.
"""

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ebpflb.datapath import kernel
from ebpflb.datapath.maps import records
from ebpflb.datapath.maps.layout import MapSpec
from ebpflb.errors import KernelError
from ebpflb.model.kernel_lists import parse_ranges

BATCH = 4096  # entries; 256 to 65,536 are equally fast
_NO_BATCH = (kernel.ENOTSUPP, errno.EINVAL)


class Map:
    """One map of maps.h behind its descriptor."""

    def __init__(self, spec: MapSpec, fd: int) -> None:
        self.spec = spec
        self.fd = fd
        self.key = records.codec(spec.key)
        self.value = records.codec(spec.value)

    def __repr__(self) -> str:
        return f"<Map {self.spec.name} fd={self.fd}>"

    def close(self) -> None:
        os.close(self.fd)

    def get(self, key: Any) -> Any:
        """The value of a key, or None where it is not there."""
        packed = kernel.map_lookup(self.fd, self.key.pack(key), self.spec.value_size)
        return None if packed is None else self.value.unpack(packed)

    def write(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Inserts or replaces. Raises KernelError (E2BIG: the map is full) having written some."""
        for start in range(0, len(pairs), BATCH):
            chunk = pairs[start : start + BATCH]
            self._write(
                [self.key.pack(key) for key, _ in chunk],
                [self.value.pack(value) for _, value in chunk],
            )

    def delete(self, keys: Sequence[Any]) -> None:
        """Deletes those of the keys that are there."""
        for key in keys:
            kernel.map_delete(self.fd, self.key.pack(key))

    def pop(self, key: Any) -> Any:
        """Deletes a hash's key; its last value, or None where it was not there."""
        packed, size = self.key.pack(key), self.spec.value_size
        try:
            value = kernel.map_lookup(self.fd, packed, size, delete=True)
        except KernelError as error:
            if error.errno not in _NO_BATCH:
                raise
            value = kernel.map_lookup(self.fd, packed, size)
            kernel.map_delete(self.fd, packed)
        return None if value is None else self.value.unpack(value)

    def insert(self, key: Any, value: Any) -> bool:
        """Writes a key that is not there; False, and nothing is written, where it is."""
        try:
            kernel.map_update(self.fd, self.key.pack(key), self.value.pack(value), new=True)
        except KernelError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        return True

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All entries of a hash. Where it changes meanwhile, each bucket is as it was when read."""
        for key, value in self.packed_items():
            yield self.key.unpack(key), self.value.unpack(value)

    def packed_items(self) -> Iterator[tuple[bytes, bytes]]:
        """As ``items``, with keys and values as the map has them."""
        key_size, value_size = self.spec.key_size, self.spec.value_size
        for keys, values in self.slices():
            for index in range(len(keys) // key_size):
                yield (
                    keys[index * key_size : (index + 1) * key_size],
                    values[index * value_size : (index + 1) * value_size],
                )

    def _write(self, keys: list[bytes], values: list[bytes]) -> None:
        try:
            kernel.map_write_batch(self.fd, b"".join(keys), b"".join(values), len(keys))
        except KernelError as error:
            if error.errno not in _NO_BATCH:
                raise
            for key, value in zip(keys, values, strict=True):
                kernel.map_update(self.fd, key, value)

    def slices(self, size: int = BATCH) -> Iterator[tuple[bytes, bytes]]:
        """The packed keys of up to ``size`` entries, joined, and their values; until all are read.

        Raises KernelError (ENOSPC) where a bucket of the hash holds more.
        """
        try:
            yield from self._batches(size)
        except KernelError as error:
            if error.errno not in _NO_BATCH:
                raise
            pairs = list(self._walked_items())  # a walk starts over where its key was deleted
            for start in range(0, len(pairs), size):
                part = pairs[start : start + size]
                yield b"".join(key for key, _ in part), b"".join(value for _, value in part)

    def _batches(self, size: int) -> Iterator[tuple[bytes, bytes]]:
        key_size, value_size = self.spec.key_size, self.spec.value_size
        keys, values = bytearray(key_size * size), bytearray(value_size * size)
        cursor, ended = None, False
        while not ended:
            count, cursor = kernel.map_lookup_batch(self.fd, cursor, keys, values, size)
            ended = cursor is None
            yield bytes(keys[: count * key_size]), bytes(values[: count * value_size])

    def _walked_items(self) -> Iterator[tuple[bytes, bytes]]:
        key = kernel.map_next_key(self.fd, None, self.spec.key_size)
        seen: set[bytes] = set()
        while key is not None and key not in seen:
            seen.add(key)
            value = kernel.map_lookup(self.fd, key, self.spec.value_size)
            if value is not None:
                yield key, value
            key = kernel.map_next_key(self.fd, key, self.spec.key_size)


class MappedArray(Map):
    """An MMAPABLE array: elements are read and written in place, without a call."""

    def __init__(self, spec: MapSpec, fd: int, *, writable: bool = True) -> None:
        super().__init__(spec, fd)
        self.stride, self.size = _stride(spec), spec.value_size
        size = -(-spec.entries * self.stride // mmap.PAGESIZE) * mmap.PAGESIZE
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.memory = mmap.mmap(fd, size, mmap.MAP_SHARED, access)

    def close(self) -> None:
        self.memory.close()
        super().close()

    def get(self, key: int) -> Any:
        at = key * self.stride
        return self.value.unpack(self.memory[at : at + self.size])

    def write(self, pairs: Sequence[tuple[int, Any]]) -> None:
        for index, value in pairs:
            at = index * self.stride
            self.memory[at : at + self.size] = self.value.pack(value)


class Counters(Map):
    """A per-CPU array: each element is read as the sum over all CPUs."""

    def __init__(self, spec: MapSpec, fd: int) -> None:
        super().__init__(spec, fd)
        self.stride = _stride(spec)
        self.size = self.stride * possible_cpus()

    def get(self, key: int) -> tuple[int, ...]:
        packed = kernel.map_lookup(self.fd, self.key.pack(key), self.size)
        assert packed is not None, f"{self.spec.name} has no element {key}"
        cells = [packed[at : at + self.spec.value_size] for at in range(0, self.size, self.stride)]
        return tuple(map(sum, zip(*(_numbers(cell) for cell in cells), strict=True)))

    def zero(self, keys: Sequence[int]) -> None:
        """Sets counters to zero, before their ids are used again."""
        for key in keys:
            kernel.map_update(self.fd, self.key.pack(key), bytes(self.size))


def _stride(spec: MapSpec) -> int:
    """The kernel lays out an array's elements in steps of eight bytes."""
    return -(-spec.value_size // 8) * 8


def _numbers(cell: bytes) -> Iterator[int]:
    return (int.from_bytes(cell[at : at + 8], "little") for at in range(0, len(cell), 8))


def possible_cpus() -> int:
    """How many CPUs the kernel lays per-CPU values out for."""
    return sum(map(len, parse_ranges(Path("/sys/devices/system/cpu/possible").read_text())))


def open_map(spec: MapSpec, fd: int, *, writable: bool = True) -> Map:
    """The class that fits the map's kind and flags."""
    if spec.kind == "PERCPU_ARRAY":
        return Counters(spec, fd)
    if "MMAPABLE" in spec.flags:
        return MappedArray(spec, fd, writable=writable)
    return Map(spec, fd)


def create_map(spec: MapSpec) -> int:
    """Creates a map as defined by its line in maps.h."""
    return kernel.map_create(
        name=spec.name,
        kind=spec.kind,
        key_size=spec.key_size,
        value_size=spec.value_size,
        entries=spec.entries,
        flags=spec.flags,
    )
