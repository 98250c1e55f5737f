# SPDX-License-Identifier: Apache-2.0
"""The monitoring variant of the programs: the node's maps, and three of its own."""

import hashlib
import logging
import mmap
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps import bpf_map, layout
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import RECORDS, Monitor, MonitorEvent
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import ProgramSet, read_members

# What an agent and ``ebpflb monitor`` say to each other before events flow, and their frames.

FRAME = struct.Struct("=QI")


class MonitorQuestion(msgspec.Struct):
    """``format`` is ``format_hash()``; ``verdicts`` has a bit for each that is wanted."""

    format: str
    verdicts: int


class MonitorAnswer(msgspec.Struct):
    """Why it cannot be; nothing if it can."""

    error: str = ""


# A ring buffer of the kernel's (Documentation/bpf/ringbuf.rst) whose records have one size.
#
# Pages of its descriptor: where the reader is, where the writers are, then the data, twice, so that
# what goes round its end lies in one piece too. A record has a header of eight bytes, whose first
# word is its length, with a bit while it is being written.

HEADER = 8
_BUSY = 1 << 31  # BPF_RINGBUF_BUSY_BIT
_WORD = 4
_POSITION = struct.Struct("=Q")


class Ring:
    """To be read by one thread."""

    def __init__(self, opened: Map, record: int) -> None:
        """``record`` is the size of one, in bytes. Raises OSError."""
        self.stride = HEADER + -(-record // 8) * 8
        self._size = opened.spec.entries
        self._reader = mmap.mmap(opened.fd, mmap.PAGESIZE)
        pages = mmap.PAGESIZE + 2 * self._size
        self._data = mmap.mmap(
            opened.fd, pages, mmap.MAP_SHARED, mmap.PROT_READ, offset=mmap.PAGESIZE
        )
        self._words = memoryview(self._data).cast("I")

    def take(self) -> bytes:
        """All records that are whole, in their order, each with its header.

        The headers are read before the records that they are of.
        """
        begin = _POSITION.unpack_from(self._reader)[0]
        end = _POSITION.unpack_from(self._data)[0]
        if begin == end:
            return b""
        at = mmap.PAGESIZE + begin % self._size
        headers = self._words[at // _WORD : (at + end - begin) // _WORD : self.stride // _WORD]
        count = next((i for i, word in enumerate(headers) if word & _BUSY), len(headers))
        taken = self._data[at : at + count * self.stride]
        self._reader[: _POSITION.size] = _POSITION.pack(begin + count * self.stride)
        return taken

    def close(self) -> None:
        self._words.release()
        for each in (self._data, self._reader):
            with suppress(BufferError):
                each.close()


# Which decisions can be asked for, and their events as values (bpf/record/events.h).

EVENT_RECORD = RECORDS["struct event"]
SIZE = EVENT_RECORD.struct.size
STRIDE = HEADER + SIZE
HOOKS = layout.names("event_hook", "EVENT_")
FLOW_KINDS = layout.names("flow_kind", "FLOW_")
# Counted on the way to a verdict, and no decision of its own; and how many there are.
_NO_DECISIONS = {"retried", "s"}
DECISIONS = {word: number for number, word in layout.VERDICTS.items() if word not in _NO_DECISIONS}
# Of every packet: shown if they are asked for by name.
FREQUENT = frozenset({"passed", "established", "reply_translated"})
USUAL = frozenset(DECISIONS) - FREQUENT


def format_hash() -> str:
    """Names how events are laid out: an agent and a command of two versions may differ."""
    text = (layout.SOURCES / "record/events.h").read_text()
    return hashlib.sha256(f"{layout.layout_hash()} {text}".encode()).hexdigest()[:12]


def decision_mask(verdicts: Iterable[str]) -> int:
    """A bit for each; raises KeyError for what is no decision."""
    return sum(1 << DECISIONS[word] for word in verdicts)


def unpack_decision(records: bytes) -> Iterator[MonitorEvent]:
    """The events of ``Ring.take``."""
    for at in range(0, len(records), STRIDE):
        yield EVENT_RECORD.unpack(records[at + HEADER : at + STRIDE])


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
