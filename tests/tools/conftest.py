# SPDX-License-Identifier: Apache-2.0
"""Maps in the kernel, pinned while one file of tests runs."""

import os
import struct
from collections.abc import Iterator

import pytest

from ebpflb.kernel import bpf
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.bpf_map import Counters, Map
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir


@pytest.fixture(scope="module")
def maps() -> Iterator[dict[str, Map]]:
    """Return all maps, empty."""
    state = StateDir(BPFFS / f"ebpflb-test-{os.getpid()}-dump")
    state.prepare()
    opened = state.open_maps()
    yield opened
    for each in opened.values():
        each.close()
    unpin_all(state)


def count(opened: Map, number: int, *values: int) -> None:
    """Set an element's counters, on the first CPU."""
    assert isinstance(opened, Counters)
    cell = struct.pack(f"={len(values)}Q", *values)
    packed = cell.ljust(opened.size, b"\0")
    bpf.map_update(opened.fd, opened.key.pack(number), packed)
