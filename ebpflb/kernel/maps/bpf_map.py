# SPDX-License-Identifier: Apache-2.0
"""A map as a collection of values: hashes are written in batches, arrays through memory.

If the kernel has no batch command for a type of map (5.10: per-CPU arrays, tries), it returns
ENOTSUPP, and the entries are written one by one.
"""

import errno
import mmap
import os
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from struct import Struct, pack, unpack
from threading import Lock
from typing import Any, Literal

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.maps import layout, records
from ebpflb.kernel.maps.layout import COUNTER_PARTS, MapSpec
from ebpflb.model.addresses import parse_ranges

# An array's elements as memory of this process, read and written in place.
#
# Mapped memory counts as the process's memory whether used or not: all arrays together have 44 MB
# on two CPUs. So a small array is mapped whole, and of a large one only the part that was read or
# written last: the next elements are mostly beside it, and to map a part takes 10 us.

SMALL = 2 << 20  # bytes
PART = 64 << 10


class ArrayMemory:
    """The elements of an MMAPABLE array, of ``size`` bytes in total (5.5). Safe in any thread.

    Raises ValueError after ``close``.
    """

    def __init__(self, map_fd: int, size: int, *, writable: bool) -> None:
        self._fd, self._size = map_fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._lock = Lock()
        self._is_closed = False  # then the descriptor may belong to another file
        self.is_small = self._size <= SMALL
        self._part = self._size if self.is_small else PART
        self._mapped: mmap.mmap | None = None
        self._first = 0  # byte of the mapped part, after the first use

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, which: slice) -> bytes:
        with self._window(which) as (window, start, end):
            return window[start:end]

    def __setitem__(self, which: slice, data: bytes) -> None:
        with self._window(which) as (window, start, end):
            window[start:end] = data

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._mapped:
                self._mapped.close()

    @contextmanager
    def _window(self, which: slice) -> Iterator[tuple[mmap.mmap, int, int]]:
        """Yield a mapping of at least this range, and where the range is in it."""
        start, end, _ = which.indices(self._size)
        with self._lock:
            if self._is_closed:
                raise ValueError("the map is closed")
            first = min(start, self._size - 1) // self._part * self._part
            if end <= first + self._part:
                yield self._part_from(first), start - first, end - first
                return
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            with self._map(first, end - first) as window:
                yield window, start - first, end - first

    def _part_from(self, first: int) -> mmap.mmap:
        if self._mapped is None or first != self._first:
            former = self._mapped
            self._mapped = self._map(first, min(self._part, self._size - first))
            self._first = first
            if former:
                former.close()
        return self._mapped

    def _map(self, offset: int, size: int) -> mmap.mmap:
        return mmap.mmap(self._fd, size, mmap.MAP_SHARED, self._access, offset=offset)


# All entries of a map in slices: their keys and their values, packed and joined.
#
# If the kernel has no batch command for a type of map, entries are read one by one (see
# above).

NO_BATCH = (bpf.ENOTSUPP, errno.EINVAL)

Slices = Iterator[tuple[bytes, bytes]]


def hash_slices(fd: int, spec: MapSpec, size: int) -> Slices:
    """Yield slices of up to ``size`` entries.

    Raises KernelError (ENOSPC) if a bucket holds more.
    """
    try:
        yield from _batches(fd, spec, size)
    except KernelError as error:
        if error.errno not in NO_BATCH:
            raise
        walk = _walked_items(fd, spec)
        while part := list(islice(walk, size)):
            yield b"".join(key for key, _ in part), b"".join(value for _, value in part)


def array_slices(memory: ArrayMemory, spec: MapSpec, stride: int, count: int) -> Slices:
    """Yield indexes and elements that are not zero, joined, from ``count`` elements at a time."""
    zero, elements = bytes(spec.value_size), read_element(spec, stride)
    zeros = bytes(count * stride)
    for start in range(0, spec.entries, count):
        part = memory[start * stride : min(start + count, spec.entries) * stride]
        if part != zeros[: len(part)]:
            found = enumerate(elements.iter_unpack(part), start)
            some = [(index, value) for index, (value,) in found if value != zero]
            keys = pack(f"={len(some)}I", *(index for index, _ in some))
            yield keys, b"".join([value for _, value in some])


def pairs(spec: MapSpec, keys: bytes, values: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of a slice."""
    key_size, value_size = spec.key_size, spec.value_size
    for index in range(len(keys) // key_size):
        yield (
            keys[index * key_size : (index + 1) * key_size],
            values[index * value_size : (index + 1) * value_size],
        )


def read_element(spec: MapSpec, stride: int) -> Struct:
    """Return the struct of one element, without its padding."""
    return Struct(f"{spec.value_size}s{stride - spec.value_size}x")


def _batches(fd: int, spec: MapSpec, size: int) -> Slices:
    keys, values = bytearray(spec.key_size * size), bytearray(spec.value_size * size)
    found_keys, found_values = memoryview(keys), memoryview(values)
    cursor, ended = None, False
    while not ended:
        count, cursor = bpf.map_lookup_batch(fd, cursor, keys, values, size)
        ended = cursor is None
        each = found_keys[: count * spec.key_size], found_values[: count * spec.value_size]
        yield bytes(each[0]), bytes(each[1])


def _walked_items(fd: int, spec: MapSpec) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries one by one.

    If the current key is deleted, the kernel begins again at the first key: known keys are skipped.
    The walk ends after three times as many steps as the map has entries, whatever is deleted
    meanwhile.
    """
    key = bpf.map_next_key(fd, None, spec.key_size)
    seen: set[bytes] = set()
    for _ in range(3 * spec.entries):
        if key is None:
            return
        if key not in seen:
            seen.add(key)
            value = bpf.map_lookup(fd, key, spec.value_size)
            if value is not None:
                yield key, value
        key = bpf.map_next_key(fd, key, spec.key_size)


# The kernel's form of a line of maps.h: kind, number of entries and size.

POSSIBLE_CPUS = Path("/sys/devices/system/cpu/possible")
CPU_ARRAYS = "CPU_ARRAYS"  # an ARRAY with these entries for each CPU (bpf/maps.h)


def kernel_kind(spec: MapSpec) -> str:
    """Return the kernel's name of a map's kind."""
    return "ARRAY" if spec.kind == CPU_ARRAYS else spec.kind


def kernel_entries(spec: MapSpec) -> int:
    """Return the number of entries of the kernel's map."""
    return spec.entries * (counter_parts() if spec.kind == CPU_ARRAYS else 1)


def stride(spec: MapSpec) -> int:
    """Return the distance of elements: the kernel aligns them to eight bytes."""
    return -(-spec.value_size // 8) * 8


@cache
def possible_cpus() -> int:
    """Return the number of CPUs for which the kernel has per-CPU values."""
    return sum(map(len, parse_ranges(POSSIBLE_CPUS.read_text())))


@cache
def counter_parts() -> int:
    """Return the number of parts of a map of counters: one for each CPU number, up to a limit.

    Some numbers may have no CPU.
    """
    return min(COUNTER_PARTS, max(each.stop for each in parse_ranges(POSSIBLE_CPUS.read_text())))


BATCH = 4096  # entries; 256 to 65,536 are equally fast


class Map:
    """One map of maps.h behind its descriptor.

    A value whose check does not match its key counts as missing, or as an empty element of an
    array; the programs treat it the same way.
    """

    def __init__(self, spec: MapSpec, fd: int) -> None:
        self.spec = spec
        self.fd = fd
        self.key = records.codec(spec.key)
        self.value = records.codec(spec.value)
        self.check = layout.check_in(spec)

    def close(self) -> None:
        os.close(self.fd)

    def get(self, key: Any) -> Any:
        """Return the value of a key, or None for an unknown key."""
        packed_key = self.key.pack(key)
        packed = bpf.map_lookup(self.fd, packed_key, self.spec.value_size)
        if packed is None or not self.check.is_right(packed_key, packed):
            return None
        return self.value.unpack(packed)

    def get_range(self, first: int, count: int) -> list[Any]:
        """Return the values of ``count`` elements of an array, from ``first`` on."""
        return [self.get(key) for key in range(first, first + count)]

    def get_many(self, keys: Collection[Any]) -> dict[Any, Any]:
        """Return what ``get`` returns for each key."""
        return {key: self.get(key) for key in keys}

    def write(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Insert or replace. Raises KernelError (E2BIG: the map is full) after writing some."""
        for start in range(0, len(pairs), BATCH):
            packed = [self.packed(*pair) for pair in pairs[start : start + BATCH]]
            self._write([key for key, _ in packed], [value for _, value in packed])

    def packed(self, key: Any, value: Any) -> tuple[bytes, bytes]:
        """Return key and value as the map holds them."""
        packed_key = self.key.pack(key)
        return packed_key, self.check.signed(packed_key, self.value.pack(value))

    def delete(self, keys: Sequence[Any]) -> int:
        """Delete the keys; return how many of them existed."""
        return sum(bpf.map_delete(self.fd, self.key.pack(key)) for key in keys)

    def replace(self, key: Any, value: Any) -> bool:
        """Write an existing key; return False, without writing, if the key does not exist."""
        return self._update(key, value, bpf.EXIST, errno.ENOENT)

    def add(self, key: Any, value: Any) -> bool:
        """Write a new key; return False, without writing, if the key exists."""
        return self._update(key, value, bpf.NOEXIST, errno.EEXIST)

    def _update(self, key: Any, value: Any, flags: int, refused: int) -> bool:
        try:
            bpf.map_update(self.fd, *self.packed(key, value), flags)
        except KernelError as error:
            if error.errno != refused:
                raise
            return False
        return True

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield all entries of a hash.

        If it changes meanwhile, each bucket is as it was when it was read.
        """
        for key, value in self.packed_items():
            if self.check.is_right(key, value):
                yield self.key.unpack(key), self.value.unpack(value)

    def packed_items(self) -> Iterator[tuple[bytes, bytes]]:
        """Like ``items``, with keys and values as the map holds them."""
        for keys, values in self.slices():
            yield from pairs(self.spec, keys, values)

    def unpacked(self, keys: bytes, values: bytes) -> Iterator[tuple[Any, Any]]:
        """Yield the entries of one of ``slices``."""
        for key, value in pairs(self.spec, keys, values):
            yield self.key.unpack(key), self.value.unpack(value)

    def _write(self, keys: list[bytes], values: list[bytes]) -> None:
        all_keys, all_values = b"".join(keys), b"".join(values)
        try:
            bpf.map_write_batch(self.fd, all_keys, all_values, len(keys))
        except KernelError as error:
            if error.errno not in NO_BATCH:
                raise
            for key, value in zip(keys, values, strict=True):
                bpf.map_update(self.fd, key, value)

    def slices(self, size: int = BATCH) -> Iterator[tuple[bytes, bytes]]:
        """Yield the packed keys of up to ``size`` entries, joined, and their values, until the end.

        Raises KernelError (ENOSPC) if a bucket of the hash holds more.
        """
        return hash_slices(self.fd, self.spec, size)

    def count(self) -> int:
        """Return the number of entries; of an array, those that are not zero."""
        return sum(len(keys) // self.spec.key_size for keys, _ in self.slices())


FEW = 4  # elements; more are written faster by one call than each in place
_Number = Literal["I", "Q"]  # as memoryview.cast names them
_NUMBERS: dict[str, _Number] = {"__u32": "I", "__u64": "Q"}  # by the type of a value


class MappedArray(Map):
    """An MMAPABLE array: ranges, and elements of small ones, are read and written in place.

    A single element of a large array is anywhere: a call takes half the time of mapping its part.
    """

    def __init__(self, spec: MapSpec, fd: int, *, writable: bool = True) -> None:
        super().__init__(spec, fd)
        self.stride, self.size = stride(spec), spec.value_size
        self._element = read_element(spec, self.stride)
        self._number = _NUMBERS.get(spec.value)
        self.memory = ArrayMemory(fd, spec.entries * self.stride, writable=writable)

    def close(self) -> None:
        self.memory.close()
        super().close()

    def get(self, key: int) -> Any:
        if self.memory.is_small:
            return self.get_range(key, 1)[0]
        found = super().get(key)
        return self.value.unpack(bytes(self.size)) if found is None else found

    def get_range(self, first: int, count: int) -> list[Any]:
        if self._number:  # 13 times as fast as one by one: a start reads all of backend_slots
            packed = self._elements(first, count)
            return memoryview(packed).cast(self._number)[:: self.stride // self.size].tolist()
        return [self.value.unpack(value) for value in self.packed_range(first, count)]

    def packed_range(self, first: int, count: int) -> Iterator[bytes]:
        """Yield the elements as the map holds them; one with a wrong check is zero."""
        is_right, pack_key, zero = self.check.is_right, self.key.pack, bytes(self.size)
        found = enumerate(self._element.iter_unpack(self._elements(first, count)), first)
        if isinstance(self.check, layout.NoCheck):
            return (value for _, (value,) in found)
        return (value if is_right(pack_key(key), value) else zero for key, (value,) in found)

    def _elements(self, first: int, count: int) -> bytes:
        return self.memory[first * self.stride : (first + count) * self.stride]

    def write(self, pairs: Sequence[tuple[int, Any]]) -> None:
        if len(pairs) > FEW or not self.memory.is_small:
            super().write(pairs)
            return
        for index, value in pairs:
            at = index * self.stride
            _, self.memory[at : at + self.size] = self.packed(index, value)

    def write_field(self, index: int, field: str, number: int) -> None:
        """Write only this __u64 of an element: programs write the others."""
        at = index * self.stride + layout.ffi.offsetof(self.spec.value, field)
        self.memory[at : at + 8] = pack("=Q", number)

    def write_run(self, first: int, values: "array[int]") -> None:
        """Write consecutive elements, from ``first`` on, that no program reads yet.

        ``values`` are the 32-bit numbers of one element after another. For maps without a check.
        """
        words, step = self.size // 4, self.stride // 4
        count = len(values) // words
        padded = array("I", bytes(count * self.stride))
        for word in range(words):
            padded[word::step] = values[word::words]
        self.memory[first * self.stride : (first + count) * self.stride] = padded.tobytes()

    def slices(self, size: int = BATCH) -> Iterator[tuple[bytes, bytes]]:
        """Yield only elements that are not zero."""
        return array_slices(self.memory, self.spec, self.stride, size)


_READ_AT_ONCE = 4096  # elements of each CPU


class Counters(Map):
    """A per-CPU array: each element is read as the sum over all CPUs."""

    def __init__(self, spec: MapSpec, fd: int) -> None:
        super().__init__(spec, fd)
        self.stride = stride(spec)
        self.size = self.stride * possible_cpus()

    def get(self, key: int) -> tuple[int, ...]:
        cells = (unpack(f"={len(cell) // 8}Q", cell) for cell in self._cells(key))
        return tuple(map(sum, zip(*cells, strict=True)))

    def _cells(self, key: int) -> Iterator[bytes]:
        """Yield the element of each CPU."""
        packed = bpf.map_lookup(self.fd, self.key.pack(key), self.size)
        assert packed is not None, f"{self.spec.name} has no element {key}"
        return (packed[at : at + self.spec.value_size] for at in range(0, self.size, self.stride))

    def zero(self, keys: Sequence[int]) -> None:
        """Set counters to zero, before their ids are used again."""
        for key in keys:
            bpf.map_update(self.fd, self.key.pack(key), bytes(self.size))


class CpuArrays(Counters):
    """The same as an array for each CPU, read and written in place."""

    def __init__(self, spec: MapSpec, fd: int, *, writable: bool = True) -> None:
        super().__init__(spec, fd)
        self.size, self.whole = spec.value_size, kernel_entries(spec) * self.stride
        self.memory = ArrayMemory(fd, self.whole, writable=writable)

    def close(self) -> None:
        self.memory.close()
        super().close()

    def _cells(self, key: int) -> Iterator[bytes]:
        cells = (bpf.map_lookup(self.fd, each, self.size) for each in self._keys(key))
        return (each or bytes(self.size) for each in cells)

    def get_many(self, keys: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Return what ``get`` returns for each key, in a tenth of the time for 10,000 of them."""
        words, step = self.size // 8, self.stride // 8
        found: dict[int, tuple[int, ...]] = {}
        for block, members in groupby(sorted(keys), lambda key: key // _READ_AT_ONCE):
            first = block * _READ_AT_ONCE
            cpus = [
                memoryview(self.memory[at : at + _READ_AT_ONCE * self.stride]).cast("Q")
                for at in self._places(first)
            ]
            for key in members:
                start = (key - first) * step
                sums = [sum(cpu[at] for cpu in cpus) for at in range(start, start + words)]
                found[key] = tuple(sums)
        return found

    def zero(self, keys: Sequence[int]) -> None:
        for key in keys:
            for each in self._keys(key):
                bpf.map_update(self.fd, each, bytes(self.size))

    def _keys(self, key: int) -> Iterator[bytes]:
        """Yield the array's own keys of an element, one for each CPU."""
        return (self.key.pack(at // self.stride) for at in self._places(key))

    def _places(self, key: int) -> range:
        assert key < self.spec.entries, f"{self.spec.name} has no element {key}"
        return range(key * self.stride, self.whole, self.spec.entries * self.stride)


def open_map(spec: MapSpec, fd: int, *, writable: bool = True) -> Map:
    """Return an object of the class that fits the map's kind and flags."""
    if spec.kind == "PERCPU_ARRAY":
        return Counters(spec, fd)
    if spec.kind == CPU_ARRAYS:
        return CpuArrays(spec, fd, writable=writable)
    if "MMAPABLE" in spec.flags:
        return MappedArray(spec, fd, writable=writable)
    return Map(spec, fd)
