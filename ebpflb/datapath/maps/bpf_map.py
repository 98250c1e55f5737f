# SPDX-License-Identifier: Apache-2.0
"""A map as a collection of values: hashes are written in batches, arrays through memory.

If the kernel has no batch command for a type of map (5.10: per-CPU arrays, tries), it returns
ENOTSUPP, and the entries are written one by one.
"""

import errno
import os
from array import array
from collections.abc import Iterator, Sequence
from struct import pack, unpack
from typing import Any

from ebpflb.datapath import kernel
from ebpflb.datapath.attributes import MAP_FLAGS
from ebpflb.datapath.maps import checks, locked, records, sizes, slices
from ebpflb.datapath.maps.array_memory import ArrayMemory
from ebpflb.datapath.maps.layout import MapSpec
from ebpflb.datapath.maps.written import Wrote, unrecorded
from ebpflb.errors import KernelError

BATCH = 4096  # entries; 256 to 65,536 are equally fast


class Map:
    """One map of maps.h behind its descriptor.

    A value whose check is not that of its key counts as not there, or as an empty element of an
    array, as it does for the programs.
    """

    def __init__(self, spec: MapSpec, fd: int) -> None:
        self.spec = spec
        self.fd = fd
        self.key = records.codec(spec.key)
        self.value = records.codec(spec.value)
        self.check = checks.check_in(spec)
        self.wrote: Wrote = unrecorded  # called after each write

    def close(self) -> None:
        os.close(self.fd)

    def get(self, key: Any) -> Any:
        """The value of a key, or None where it is not there."""
        packed_key = self.key.pack(key)
        packed = kernel.map_lookup(self.fd, packed_key, self.spec.value_size)
        if packed is None or not self.check.is_right(packed_key, packed):
            return None
        return self.value.unpack(packed)

    def get_range(self, first: int, count: int) -> list[Any]:
        """The values of so many elements of an array, from one on."""
        return [self.get(key) for key in range(first, first + count)]

    def write(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Inserts or replaces. Raises KernelError (E2BIG: the map is full) having written some."""
        for start in range(0, len(pairs), BATCH):
            packed = [self.packed(*pair) for pair in pairs[start : start + BATCH]]
            self._write([key for key, _ in packed], [value for _, value in packed])

    def packed(self, key: Any, value: Any) -> tuple[bytes, bytes]:
        """Key and value as the map has them."""
        packed_key = self.key.pack(key)
        return packed_key, self.check.signed(packed_key, self.value.pack(value))

    def delete(self, keys: Sequence[Any]) -> None:
        """Deletes those of the keys that are there."""
        packed = [self.key.pack(key) for key in keys]
        for key in packed:
            kernel.map_delete(self.fd, key)
        if packed:
            self.wrote(self.spec.name, b"".join(packed), None)

    def pop(self, key: Any) -> Any:
        """Deletes a hash's key; its last value, or None where it was not there."""
        packed, size = self.key.pack(key), self.spec.value_size
        try:
            value = kernel.map_lookup(self.fd, packed, size, delete=True)
        except KernelError as error:
            if error.errno not in slices.NO_BATCH:
                raise
            value = kernel.map_lookup(self.fd, packed, size)
            kernel.map_delete(self.fd, packed)
        return None if value is None else self.value.unpack(value)

    def insert(self, key: Any, value: Any) -> bool:
        """Writes a key that is not there; False, and nothing is written, where it is."""
        return self._update(key, value, errno.EEXIST, known=False)

    def replace(self, key: Any, value: Any) -> bool:
        """Writes a key that is there; False, and nothing is written, where it is not."""
        return self._update(key, value, errno.ENOENT, known=True)

    def _update(self, key: Any, value: Any, refusal: int, *, known: bool) -> bool:
        packed = self.packed(key, value)
        try:
            kernel.map_update(self.fd, *packed, new=not known, known=known)
        except KernelError as error:
            if error.errno != refusal:
                raise
            return False
        return True

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All entries of a hash. Where it changes meanwhile, each bucket is as it was when read."""
        for key, value in self.packed_items():
            if self.check.is_right(key, value):
                yield self.key.unpack(key), self.value.unpack(value)

    def packed_items(self) -> Iterator[tuple[bytes, bytes]]:
        """As ``items``, with keys and values as the map has them."""
        for keys, values in self.slices():
            yield from slices.pairs(self.spec, keys, values)

    def unpacked(self, keys: bytes, values: bytes) -> Iterator[tuple[Any, Any]]:
        """The entries of one of ``slices``."""
        for key, value in slices.pairs(self.spec, keys, values):
            yield self.key.unpack(key), self.value.unpack(value)

    def _write(self, keys: list[bytes], values: list[bytes]) -> None:
        all_keys, all_values = b"".join(keys), b"".join(values)
        try:
            kernel.map_write_batch(self.fd, all_keys, all_values, len(keys))
        except KernelError as error:
            if error.errno not in slices.NO_BATCH:
                raise
            for key, value in zip(keys, values, strict=True):
                kernel.map_update(self.fd, key, value)
        self.wrote(self.spec.name, all_keys, all_values)

    def slices(self, size: int = BATCH) -> Iterator[tuple[bytes, bytes]]:
        """The packed keys of up to ``size`` entries, joined, and their values; until all are read.

        Raises KernelError (ENOSPC) where a bucket of the hash holds more.
        """
        return slices.of_hash(self.fd, self.spec, size)


class MappedArray(Map):
    """An MMAPABLE array: elements are read and written in place, without a call."""

    def __init__(self, spec: MapSpec, fd: int, *, writable: bool = True) -> None:
        super().__init__(spec, fd)
        self.stride, self.size = sizes.stride(spec), spec.value_size
        self._element = slices.element(spec, self.stride)
        self.memory = ArrayMemory(fd, spec.entries * self.stride, writable=writable)

    def close(self) -> None:
        self.memory.close()
        super().close()

    def get(self, key: int) -> Any:
        return self.get_range(key, 1)[0]

    def get_range(self, first: int, count: int) -> list[Any]:
        packed = self.memory[first * self.stride : (first + count) * self.stride]
        found = []
        for key, (value,) in enumerate(self._element.iter_unpack(packed), first):
            is_right = self.check.is_right(self.key.pack(key), value)
            found.append(self.value.unpack(value if is_right else bytes(self.size)))
        return found

    def write(self, pairs: Sequence[tuple[int, Any]]) -> None:
        written = []
        for index, value in pairs:
            at = index * self.stride
            _, packed = self.packed(index, value)
            self.memory[at : at + self.size] = packed
            written.append(packed)
        if written:
            keys = pack(f"={len(pairs)}I", *(index for index, _ in pairs))
            self.wrote(self.spec.name, keys, b"".join(written))

    def write_run(self, first: int, values: "array[int]") -> None:
        """Writes elements that follow each other, from one on, which no program reads yet.

        ``values``: the 32-bit numbers of one after the other. For maps without a check.
        """
        words, step = self.size // 4, self.stride // 4
        count = len(values) // words
        padded = array("I", bytes(count * self.stride))
        for word in range(words):
            padded[word::step] = values[word::words]
        self.memory[first * self.stride : (first + count) * self.stride] = padded.tobytes()
        keys = array("I", range(first, first + count)).tobytes()
        self.wrote(self.spec.name, keys, values.tobytes())

    def slices(self, size: int = BATCH) -> Iterator[tuple[bytes, bytes]]:
        """Of those elements only that are not zero."""
        return slices.of_array(self.memory, self.spec, self.stride, size)


class Counters(Map):
    """A per-CPU array: each element is read as the sum over all CPUs."""

    def __init__(self, spec: MapSpec, fd: int) -> None:
        super().__init__(spec, fd)
        self.stride = sizes.stride(spec)
        self.size = self.stride * sizes.possible_cpus()

    def get(self, key: int) -> tuple[int, ...]:
        cells = (unpack(f"={len(cell) // 8}Q", cell) for cell in self._cells(key))
        return tuple(map(sum, zip(*cells, strict=True)))

    def _cells(self, key: int) -> Iterator[bytes]:
        """One a CPU."""
        packed = kernel.map_lookup(self.fd, self.key.pack(key), self.size)
        assert packed is not None, f"{self.spec.name} has no element {key}"
        return (packed[at : at + self.spec.value_size] for at in range(0, self.size, self.stride))

    def zero(self, keys: Sequence[int]) -> None:
        """Sets counters to zero, before their ids are used again."""
        for key in keys:
            kernel.map_update(self.fd, self.key.pack(key), bytes(self.size))


class CpuArrays(Counters):
    """Likewise an array for each CPU, read and written in place."""

    def __init__(self, spec: MapSpec, fd: int, *, writable: bool = True) -> None:
        super().__init__(spec, fd)
        self.size, self.whole = spec.value_size, sizes.kernel_entries(spec) * self.stride
        self.memory = ArrayMemory(fd, self.whole, writable=writable, cpus=sizes.counter_parts())

    def close(self) -> None:
        self.memory.close()
        super().close()

    def _cells(self, key: int) -> Iterator[bytes]:
        return (self.memory[at : at + self.size] for at in self._places(key))

    def zero(self, keys: Sequence[int]) -> None:
        for key in keys:
            for at in self._places(key):
                self.memory[at : at + self.size] = bytes(self.size)

    def _places(self, key: int) -> range:
        assert key < self.spec.entries, f"{self.spec.name} has no element {key}"
        return range(key * self.stride, self.whole, self.spec.entries * self.stride)


def open_map(spec: MapSpec, fd: int, *, writable: bool = True) -> Map:
    """The class that fits the map's kind and flags."""
    if spec.kind == "PERCPU_ARRAY":
        return Counters(spec, fd)
    if spec.kind == sizes.CPU_ARRAYS:
        return CpuArrays(spec, fd, writable=writable)
    if "MMAPABLE" in spec.flags:
        return MappedArray(spec, fd, writable=writable)
    return Map(spec, fd)


def create_map(spec: MapSpec) -> int:
    """Creates a map as defined by its line in maps.h."""
    with locked.types_of(spec.value) as types:
        return kernel.map_create(
            name=spec.name,
            kind=sizes.kernel_kind(spec),
            sizes=(spec.key_size, spec.value_size),
            entries=sizes.kernel_entries(spec),
            flags=sum(MAP_FLAGS[flag] for flag in spec.flags),
            types=types,
        )
