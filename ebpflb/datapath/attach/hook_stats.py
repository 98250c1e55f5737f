# SPDX-License-Identifier: Apache-2.0
"""How often each hook has run and for how long, if the kernel counts that.

It does while the sysctl kernel.bpf_stats_enabled is 1, or a process holds BPF_ENABLE_STATS; each
run then reads the clock twice. The counts stay when counting ends.
"""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from ebpflb.datapath import kernel
from ebpflb.datapath.attach import cgroup_links
from ebpflb.datapath.attach.tcx import Tcx
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.datapath.programs.loader import Program

_SWITCH = Path("/proc/sys/kernel/bpf_stats_enabled")  # 5.1


class RunTime(NamedTuple):
    """Of one hook, at all places where it is attached."""

    seconds: float
    runs: int


def enabled() -> bool:
    """Whether the sysctl is 1; BPF_ENABLE_STATS of another process cannot be detected."""
    try:
        return _SWITCH.read_text().strip() == "1"
    except OSError:
        return False


def run_times(state: StateDir, loaded: Iterable[Program]) -> dict[str, RunTime]:
    """By hook. If nothing was ``loaded``, the programs of an earlier agent serve: they are found by
    their links; those attached by clsact filters are not.

    Raises KernelError; opening a program by its id takes CAP_SYS_ADMIN.
    """
    own = [(program.name, program.fd) for program in loaded]
    if own:
        return _sums(own)
    with ExitStack() as opened:
        found = []
        for name, number in sorted(_in_force(state)):
            fd = kernel.prog_by_id(number)
            opened.callback(os.close, fd)
            found.append((name, fd))
        return _sums(found)


def _in_force(state: StateDir) -> set[tuple[str, int]]:
    at_devices = Tcx(state.devices_directory)
    packets = (at_devices.programs(index).items() for index in at_devices.recorded())
    return {*cgroup_links.attached(state).items(), *(pair for pairs in packets for pair in pairs)}


def _sums(programs: Iterable[tuple[str, int]]) -> dict[str, RunTime]:
    sums: dict[str, RunTime] = {}
    for name, fd in programs:
        info = kernel.info(fd, "prog_info")
        seconds, runs = sums.get(name, (0.0, 0))
        sums[name] = RunTime(seconds + info.run_time / 1e9, runs + info.run_count)
    return sums
