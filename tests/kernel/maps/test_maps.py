# SPDX-License-Identifier: Apache-2.0
"""The maps of a real kernel are created as in maps.h, and read back as written."""

import errno
import os
import struct
from array import array
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ebpflb.entries.services import Backend, BackendLoad, Choice, Frontend, Range, ServiceEntry
from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.maps.bpf_map import BATCH, FEW, Counters, CpuArrays, Map, MappedArray
from ebpflb.kernel.maps.layout import MapSpec
from tests.kernel.variants import needs_root

pytestmark = needs_root

Opener = Callable[[MapSpec], Map]


@pytest.fixture
def opener() -> Iterator[Opener]:
    opened: list[Map] = []

    def make(spec: MapSpec) -> Map:
        opened.append(bpf_map.open_map(spec, state_dir.create_map(spec)))
        return opened[-1]

    yield make
    for map_ in opened:
        map_.close()


@pytest.fixture
def table(opener: Opener) -> Map:
    """Return a small hash of numbers."""
    return opener(MapSpec("numbers", "HASH", "__u32", "__u32", 3 * BATCH, ("NONE",)))


@pytest.mark.parametrize("name", list(layout.MAPS))
def test_kernel_agrees(all_maps: dict[str, Map], name: str) -> None:
    """The kernel's map has the sizes, entries and flags of its line in bpf/maps."""
    spec, info = layout.MAPS[name], bpf.info(all_maps[name].fd, "map_info")
    assert (info.key_size, info.value_size) == (spec.key_size, spec.value_size)
    kind, entries = bpf_map.kernel_kind(spec), bpf_map.kernel_entries(spec)
    assert (info.kind, info.entries) == (bpf.MAP_KINDS[kind], entries)
    assert info.flags == sum(bpf.MAP_FLAGS[flag] for flag in spec.flags)
    assert bpf.ffi.string(info.name).decode() == name


def test_delete_counts_existing_keys(table: Map) -> None:
    """delete() returns how many of the keys existed."""
    table.write([(1, 10), (2, 20)])
    assert (table.delete([1, 3]), table.delete([1])) == (1, 0)
    assert list(table.items()) == [(2, 20)]


@pytest.mark.parametrize("size", [64, 4 * BATCH])
def test_slices_hold_each_entry_once(table: Map, size: int) -> None:
    """Slices hold each entry once, and are not too large."""
    pairs = [(n, 7 * n) for n in range(1000)]
    table.write(pairs)
    slices = list(table.slices(size))
    assert all(len(keys) == len(values) <= 4 * size for keys, values in slices)
    keys, values = (b"".join(parts) for parts in zip(*slices, strict=True))
    assert len(keys) == 4 * len(pairs)
    numbers = (struct.unpack(f"={len(pairs)}I", packed) for packed in (keys, values))
    assert sorted(zip(*numbers, strict=True)) == pairs


def test_a_full_map_is_a_kernel_error(opener: Opener) -> None:
    """A full map is a KernelError with the errno E2BIG."""
    small = opener(MapSpec("small", "HASH", "__u32", "__u32", 4, ("NONE",)))
    with pytest.raises(KernelError) as refusal:
        small.write([(n, n) for n in range(5)])
    assert refusal.value.errno == errno.E2BIG
    assert len(list(small.items())) == 4


def refuse(number: int) -> Callable[..., Any]:
    def batch(*_arguments: Any) -> Any:
        raise KernelError("batch", number, os.strerror(number))

    return batch


@pytest.mark.parametrize("number", [bpf.ENOTSUPP, errno.EINVAL])
def test_without_batches(table: Map, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """If the kernel has no batch operations for a map, entries are written and read one by one."""
    monkeypatch.setattr(bpf, "map_write_batch", refuse(number))
    monkeypatch.setattr(bpf, "map_lookup_batch", refuse(number))
    pairs = [(n, 7 * n) for n in range(BATCH + 17)]
    table.write(pairs)
    assert sorted(table.items()) == pairs


def test_a_walk_goes_on_where_its_key_was_deleted(
    table: Map, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one by one, all remaining entries are read once, though the current one is deleted."""
    monkeypatch.setattr(bpf, "map_lookup_batch", refuse(bpf.ENOTSUPP))
    pairs = [(n, 7 * n) for n in range(100)]
    table.write(pairs)
    found = []
    for keys, values in table.slices(7):
        part = list(table.unpacked(keys, values))
        found += part
        table.delete([part[-1][0], part[0][0]])
    assert sorted(found) == pairs


def per_cpu(*numbers: int) -> bytes:
    """Return an element with these counters on the first CPU, ten times as many on the next, and so
    on.
    """
    cpus = range(bpf_map.possible_cpus())
    return b"".join((n * 10**cpu).to_bytes(8, "little") for cpu in cpus for n in numbers)


def test_a_counter_is_the_sum_over_all_cpus(opener: Opener) -> None:
    """A counter is the sum over all CPUs, field by field; setting it to zero zeroes all of them."""
    spec = layout.MAPS["flow_stats"]._replace(entries=4)
    counters = opener(spec)
    assert isinstance(counters, Counters)
    bpf.map_update(counters.fd, counters.key.pack(1), per_cpu(1, 2, 3, 4))
    factor = sum(10**cpu for cpu in range(bpf_map.possible_cpus()))
    assert counters.get(1) == (factor, 2 * factor, 3 * factor, 4 * factor)
    assert counters.get(0) == (0, 0, 0, 0)
    counters.zero([1])
    assert counters.get(1) == (0, 0, 0, 0)


def test_counters_in_arrays(opener: Opener) -> None:
    """The sums are the same if each CPU has an array; other elements keep their counts."""
    counters = opener(layout.MAPS["service_stats"]._replace(entries=4))
    assert isinstance(counters, CpuArrays)
    cpus = range(bpf_map.counter_parts())
    for at in range(4 * len(cpus)):
        bpf.map_update(counters.fd, counters.key.pack(at), struct.pack("=4Q", 1, 2, 3, at))
    factor = len(cpus)
    assert counters.get(1) == (factor, 2 * factor, 3 * factor, sum(1 + 4 * cpu for cpu in cpus))
    assert counters.get_many({2, 1}) == {1: counters.get(1), 2: counters.get(2)}
    counters.zero([1])
    assert counters.get(1) == (0, 0, 0, 0)
    assert counters.get(2)[0] == factor


def test_many_counters_are_read_in_parts(opener: Opener) -> None:
    """The last counters are read too, if the last part is incomplete."""
    counters = opener(layout.MAPS["backend_stats"]._replace(entries=10_000))
    keys = (0, 4095, 4096, 8192, 9999)
    for key in keys:
        for cpu in range(bpf_map.counter_parts()):
            at = struct.pack("=I", key + cpu * 10_000)
            bpf.map_update(counters.fd, at, struct.pack("=2Q", key, cpu))
    assert counters.get_many(keys) == {key: counters.get(key) for key in keys}
    assert counters.get_many(keys)[9999][0] == 9999 * bpf_map.counter_parts()
    assert counters.get_many(()) == {}


@pytest.mark.parametrize(
    ("announced", "parts", "count"), [("0-1,6", 7, 3), ("0-31", 32, 32), ("0-239", 32, 240)]
)
def test_parts_of_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: str, parts: int, count: int
) -> None:
    """Programs index parts by a CPU's number. If the numbers exceed the number of parts, CPUs share
    parts, because hypervisors announce hundreds of CPUs that never come.
    """
    possible = tmp_path / "possible"
    possible.write_text(f"{announced}\n")
    monkeypatch.setattr(bpf_map, "POSSIBLE_CPUS", possible)
    for function in (bpf_map.counter_parts, bpf_map.possible_cpus):
        function.cache_clear()
    try:
        assert (bpf_map.counter_parts(), bpf_map.possible_cpus()) == (parts, count)
        spec = layout.MAPS["service_stats"]
        assert bpf_map.kernel_entries(spec) == parts * spec.entries
    finally:
        for function in (bpf_map.counter_parts, bpf_map.possible_cpus):
            function.cache_clear()


MAPPED = [
    name
    for name, spec in layout.MAPS.items()
    if "MMAPABLE" in spec.flags and spec.kind == "ARRAY" and spec.entries > 1
]


def sample(name: str, index: int) -> Any:
    if name in ("backend_slots", "no_frontends"):
        return index ^ 0xA5A5
    if name == "service_places":
        return bytes([index % 251]) * layout.MAPS[name].value_size
    if name == "choices":
        return Choice(index, index + 1, index ^ 0xA5A5)
    if name == "backend_loads":
        return BackendLoad(index, index + 1, index ^ 0xA5A5)
    address = ip_address("10.1.0.1") + index
    return Backend(address, index % 65_536, frozenset({"cluster"}), index + 1, 7)


def test_a_run_is_written_at_once(all_maps: dict[str, Map]) -> None:
    """A run of entries is written by one call with the same result as single writes, and other
    elements stay.
    """
    choices = all_maps["choices"]
    assert isinstance(choices, MappedArray)
    wanted = [sample("choices", index) for index in range(5000)]
    choices.write([(99, sample("choices", 99)), (5100, sample("choices", 5100))])
    choices.write_run(100, array("I", chain.from_iterable(wanted)))
    assert choices.get_range(100, 5000) == wanted
    assert [choices.get(at) for at in (99, 5100)] == [sample("choices", at) for at in (99, 5100)]


@pytest.mark.parametrize("at_once", [1, FEW, FEW + 1, 9])
@pytest.mark.parametrize("name", MAPPED)
def test_written_through_memory(all_maps: dict[str, Map], name: str, at_once: int) -> None:
    """A program reads at its index the value that was written in place, or by one call for many."""
    opened = all_maps[name]
    indexes = [0, 1, 2, 3, 511, 512, 513, opened.spec.entries - 2, opened.spec.entries - 1]
    pairs = [(index, sample(name, index)) for index in indexes]
    for at in range(0, len(pairs), at_once):
        opened.write(pairs[at : at + at_once])
    for index in indexes:
        packed = bpf.map_lookup(opened.fd, opened.key.pack(index), opened.spec.value_size)
        assert packed == opened.packed(index, sample(name, index))[1], f"element {index}"
    assert opened.get(4) == opened.value.unpack(bytes(opened.spec.value_size))


def test_what_no_program_believes_is_not_read(all_maps: dict[str, Map]) -> None:
    """An element with another key's check, or a changed byte, counts as missing or empty.

    The ids of a service's first backends, which follow the check, are read without a test.
    """
    slots, services = all_maps["slots"], all_maps["services"]
    nobody, here = slots.value.unpack(bytes(slots.spec.value_size)), sample("slots", 9)
    _, foreign = slots.packed(8, here)
    bpf.map_update(slots.fd, slots.key.pack(9), foreign)
    assert slots.get(9) == nobody
    slots.write([(9, here)])
    assert slots.get(9) == here
    at, entry = Frontend(ip_address("172.30.0.1"), 80, 6), service_entry(7)
    key, packed = services.packed(at, entry)
    for place in range(services.check.place + 4):
        changed = packed[:place] + bytes([packed[place] ^ 0x80]) + packed[place + 1 :]
        bpf.map_update(services.fd, key, changed)
        assert services.get(at) is None and not dict(services.items())
    bpf.map_update(services.fd, key, packed[:-1] + bytes([0x80]))
    assert services.get(at) == entry._replace(backends=(0x80000000,))
    services.write([(at, entry)])
    assert services.get(at) == entry and dict(services.items()) == {at: entry}
    services.delete([at])


def service_entry(id: int) -> ServiceEntry:
    return ServiceEntry(id, frozenset({"endpoints"}), 0, 3, Range(40, 3), Range(42, 1))
