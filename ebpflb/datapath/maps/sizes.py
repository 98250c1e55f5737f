# SPDX-License-Identifier: Apache-2.0
"""What the kernel makes of a line of maps.h: the kind, and how many entries of which size."""

from functools import cache
from pathlib import Path

from ebpflb.datapath.maps.layout import COUNTER_PARTS, MapSpec
from ebpflb.model.kernel_lists import parse_ranges

_POSSIBLE = Path("/sys/devices/system/cpu/possible")
CPU_ARRAYS = "CPU_ARRAYS"  # an ARRAY with so many entries for each CPU (bpf/maps.h)


def kernel_kind(spec: MapSpec) -> str:
    """What the kernel calls a map's kind."""
    return "ARRAY" if spec.kind == CPU_ARRAYS else spec.kind


def kernel_entries(spec: MapSpec) -> int:
    """How many entries the kernel's map has."""
    return spec.entries * (counter_parts() if spec.kind == CPU_ARRAYS else 1)


def stride(spec: MapSpec) -> int:
    """The kernel lays out an array's elements in steps of eight bytes."""
    return -(-spec.value_size // 8) * 8


@cache
def possible_cpus() -> int:
    """How many CPUs the kernel lays per-CPU values out for."""
    return sum(map(len, parse_ranges(_POSSIBLE.read_text())))


@cache
def counter_parts() -> int:
    """How many parts a map of counters has: one for each number that a CPU may have, up to a limit.

    There may be numbers that no CPU has.
    """
    return min(COUNTER_PARTS, max(each.stop for each in parse_ranges(_POSSIBLE.read_text())))
