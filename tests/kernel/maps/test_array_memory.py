# SPDX-License-Identifier: Apache-2.0
"""Arrays as memory: only the parts that were used last are this process's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.kernel.maps import bpf_map, state_dir
from ebpflb.kernel.maps.bpf_map import PART, ArrayMemory
from ebpflb.kernel.maps.layout import MapSpec
from tests.kernel.variants import needs_root

pytestmark = needs_root

SIZE = 20 * PART


@pytest.fixture
def array() -> Iterator[int]:
    """The descriptor of an array of numbers."""
    fd = state_dir.create_map(
        MapSpec("numbers", "ARRAY", "__u32", "__u64", SIZE // 8, ("MMAPABLE",))
    )
    yield fd
    os.close(fd)


@pytest.fixture
def memory(array: int) -> Iterator[ArrayMemory]:
    opened = ArrayMemory(array, SIZE, writable=True)
    yield opened
    opened.close()


def mapped() -> int:
    """Bytes of maps that are mapped by this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in lines if line.endswith("anon_inode:bpf-map")]
    return sum(int(end, 16) - int(start, 16) for start, end in bounds)


@pytest.mark.parametrize("is_small", [True, False])
def test_few_parts_are_mapped(array: int, is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small array stays mapped whole, of a large one few parts do, and in the end none does."""
    monkeypatch.setattr(bpf_map, "SMALL", SIZE if is_small else SIZE - 1)
    memory, before = ArrayMemory(array, SIZE, writable=True), mapped()
    assert len(memory[:]) == len(memory) == SIZE
    assert mapped() - before == (SIZE if is_small else bpf_map.PARTS_MAPPED * PART)
    memory.close()
    assert mapped() == before


def test_one_part_for_each_cpu(array: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second read of the same counter of all CPUs of a large array maps no new part."""
    monkeypatch.setattr(bpf_map, "SMALL", 0)
    opened = ArrayMemory(array, SIZE, writable=False, cpus=12)
    before = mapped()
    for _ in range(2):
        for cpu in range(12):
            assert opened[cpu * PART : cpu * PART + 8] == bytes(8)
        assert mapped() - before == 12 * PART
    opened.close()


def test_closed(memory: ArrayMemory) -> None:
    """After closing no read or write uses the descriptor: it may be another file's by then."""
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory[0:8]
    with pytest.raises(ValueError, match="closed"):
        memory[0:8] = bytes(8)
