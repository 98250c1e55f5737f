# SPDX-License-Identifier: Apache-2.0
"""The monitoring variant of the programs: it uses the node's maps, and three of its own."""

import hashlib
import logging
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps import bpf_map, creation, layout
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import Monitor, MonitorEvent, record
from ebpflb.kernel.maps.ring import HEADER, Ring
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import ProgramSet, read_members

# The messages of an agent and ``ebpflb monitor`` before events flow, and the frames of events.

FRAME = struct.Struct("=QI")


class MonitorQuestion(msgspec.Struct):
    """``format`` is ``format_hash()``; ``verdicts`` has a bit for each wanted verdict."""

    format: str
    verdicts: int


class MonitorAnswer(msgspec.Struct):
    """``error`` says why monitoring is impossible; "" if it is possible."""

    error: str = ""


# Which decisions can be monitored, and their events as values (bpf/record/events.h).

EVENT_RECORD = record("struct event")
SIZE = EVENT_RECORD.struct.size
STRIDE = HEADER + SIZE
HOOKS = layout.names("event_hook", "EVENT_")
FLOW_KINDS = layout.names("flow_kind", "FLOW_")
# Words that are counted but are no decision: an intermediate result, and the end of the enum.
_NO_DECISIONS = {"retried", "s"}
DECISIONS = {word: number for number, word in layout.VERDICTS.items() if word not in _NO_DECISIONS}
# Decisions for every packet: shown only on request.
FREQUENT = frozenset({"passed", "established", "reply_translated"})
USUAL = frozenset(DECISIONS) - FREQUENT


def format_hash() -> str:
    """Return the name of the events' layout: agent and command may have different versions."""
    text = (layout.SOURCES / "record/events.h").read_text()
    return hashlib.sha256(f"{layout.layout_hash()} {text}".encode()).hexdigest()[:12]


def decision_mask(verdicts: Iterable[str]) -> int:
    """Return a bit mask; raises KeyError for an unknown decision."""
    return sum(1 << DECISIONS[word] for word in verdicts)


def unpack_decision(records: bytes) -> Iterator[MonitorEvent]:
    """Yield the events in the result of ``Ring.take``."""
    for at in range(0, len(records), STRIDE):
        yield EVENT_RECORD.unpack(records[at + HEADER : at + STRIDE])


log = logging.getLogger(__name__)

_TASK, _BTF = "task_struct", Path("/sys/kernel/btf/vmlinux")


class Variant:
    """The loaded programs, not attached yet; ``ring`` delivers their events."""

    def __init__(self, datapath: Datapath, cache: Path) -> None:
        """Load the programs. Safe in any thread.

        The programs for packets without a link header are loaded if the usual ones are. Raises
        CompileError, VerifierError, KernelError, NodeError or OSError.
        """
        bare = False in datapath.packet_programs
        compiled = datapath.compile(cache, more=(precompile.MONITOR,))
        offsets = _task_offsets()
        with ExitStack() as opened:
            self._maps: dict[str, Map] = {}
            for name, spec in layout.MONITOR_MAPS.items():
                made = self._maps[name] = bpf_map.open_map(spec, creation.create_map(spec))
                opened.callback(made.close)
            self.ring = Ring(self._maps["events"])
            opened.callback(self.ring.close)
            self.programs = ProgramSet(
                compiled.sockets, compiled.packets, {**datapath.maps, **self._maps}
            )
            if bare:
                self.programs.packets(False)
            self._offsets = offsets
            self._opened = opened.pop_all()

    def ask(self, verdicts: int) -> None:
        """Select the reported verdicts, by a bit for each. Raises KernelError."""
        self._maps["monitor"].write([(0, Monitor(verdicts, *self._offsets))])

    def lost(self) -> int:
        """Return the number of events lost because the ring buffer was full."""
        (count,) = self._maps["events_lost"].get(0)
        return int(count)

    def close(self) -> None:
        """Close everything except the programs, which their owner closes."""
        self._opened.close()


def _task_offsets() -> tuple[int, int]:
    """Return the offsets of process number and name in a task.

    Zeros if the kernel's BTF lacks them.
    """
    try:
        task = read_members(_BTF.read_bytes(), _TASK)
        return task["tgid"], task["comm"]
    except (OSError, ValueError, KeyError) as error:
        log.warning(
            "events have no process names, because the kernel's BTF cannot be used: %s", error
        )
        return 0, 0
