# SPDX-License-Identifier: Apache-2.0
"""The monitoring variant of the programs: the node's maps, and three of its own."""

import logging
from contextlib import ExitStack
from pathlib import Path

from ebpflb.datapath.datapath import Datapath
from ebpflb.datapath.maps import bpf_map, layout
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.records import Monitor
from ebpflb.datapath.monitoring.decisions import SIZE
from ebpflb.datapath.monitoring.ring import Ring
from ebpflb.datapath.programs import precompile
from ebpflb.datapath.programs.btf import read_members
from ebpflb.datapath.programs.program_set import ProgramSet

log = logging.getLogger(__name__)

_TASK, _BTF = "task_struct", Path("/sys/kernel/btf/vmlinux")


class Variant:
    """Loaded and not attached; ``ring`` is where its events come out."""

    def __init__(self, datapath: Datapath, cache: Path) -> None:
        """Safe in any thread. Raises CompileError, VerifierError, KernelError, NodeError, OSError.

        The programs for packets without a link header are loaded where the others' are.
        """
        bare = False in datapath.packet_programs
        compiled = datapath.compile(cache, more=(precompile.MONITOR,))
        offsets = _task_offsets()
        with ExitStack() as opened:
            self._maps: dict[str, Map] = {}
            for name, spec in layout.MONITOR_MAPS.items():
                made = self._maps[name] = bpf_map.open_map(spec, bpf_map.create_map(spec))
                opened.callback(made.close)
            self.ring = Ring(self._maps["events"], SIZE)
            opened.callback(self.ring.close)
            self.programs = ProgramSet(
                compiled.sockets, compiled.packets, {**datapath.maps, **self._maps}
            )
            if bare:
                self.programs.packets(False)
            self._offsets = offsets
            self._opened = opened.pop_all()

    def ask(self, verdicts: int) -> None:
        """Only these are told, a bit for each. Raises KernelError."""
        self._maps["monitor"].write([(0, Monitor(verdicts, *self._offsets))])

    def lost(self) -> int:
        """How many events were lost because the ring buffer was full."""
        (count,) = self._maps["events_lost"].get(0)
        return int(count)

    def close(self) -> None:
        """All but the programs, which their owner closes."""
        self._opened.close()


def _task_offsets() -> tuple[int, int]:
    """Where a task has its process's number and name; zeros where the kernel does not tell."""
    try:
        task = read_members(_BTF.read_bytes(), _TASK)
        return task["tgid"], task["comm"]
    except (OSError, ValueError, KeyError) as error:
        log.warning("processes are not named in events, for the kernel's BTF lacks: %s", error)
        return 0, 0
