# SPDX-License-Identifier: Apache-2.0
"""Arrays read as memory: of a large array only one part stays mapped."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.kernel.maps import bpf_map, state_dir
from ebpflb.kernel.maps.bpf_map import ArrayMemory
from ebpflb.kernel.maps.layout import MapSpec
from tests.kernel.variants import needs_root

pytestmark = needs_root

PART = 64 << 10
SIZE = 20 * PART


@pytest.fixture
def array() -> Iterator[int]:
    """Return the descriptor of an array of numbers."""
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
    """Return how many bytes of maps this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in lines if line.endswith("anon_inode:bpf-map")]
    return sum(int(end, 16) - int(start, 16) for start, end in bounds)


@pytest.mark.parametrize("is_small", [True, False])
def test_only_a_small_array_stays_mapped_whole(
    array: int, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large one the part of the last element stays mapped, for the elements beside it."""
    monkeypatch.setattr(bpf_map, "SMALL", SIZE if is_small else SIZE - 1)
    before = mapped()
    memory = ArrayMemory(array, SIZE, writable=True)
    assert len(memory[:]) == len(memory) == SIZE
    assert memory[SIZE:] == b""
    for first in (SIZE - 8, 8, PART - 8, PART):
        memory[first : first + 8] = numbers = first.to_bytes(8, "little")
        assert memory[first : first + 8] == memory[:][first : first + 8] == numbers
        assert memory[first - 8 : first + 8][8:] == numbers
    assert mapped() - before == (SIZE if is_small else PART)
    memory.close()
    assert mapped() == before


def test_after_closing_the_descriptor_is_unused(memory: ArrayMemory) -> None:
    """After closing, no read or write uses the descriptor, which may belong to another file."""
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory[0:8]
    with pytest.raises(ValueError, match="closed"):
        memory[0:8] = bytes(8)
