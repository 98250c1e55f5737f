# SPDX-License-Identifier: Apache-2.0
"""The monitoring variant of the programs: it uses the node's maps, and three of its own."""

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.readers import Ring
from ebpflb.kernel.maps.records import Monitor, MonitorEvent
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import ProgramSet

# The messages of ``ebpflb monitor`` and an agent: a question and an answer, each a line of JSON.
# With an answer that is no error come the descriptors of the maps HANDED_OVER. The programs stay
# in force until the connection ends.

HANDED_OVER = ("events", "events_lost")


class MonitorQuestion(msgspec.Struct):
    """``format`` is ``format_hash()``; ``verdicts`` has a bit for each wanted verdict."""

    format: str
    verdicts: int


class MonitorAnswer(msgspec.Struct):
    """``error`` says why monitoring is impossible; "" if it is possible."""

    error: str = ""


# Which decisions can be monitored (bpf/record/events.h).

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
    described = f"{layout.layout_hash()} {HANDED_OVER} {text}"
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def decision_mask(verdicts: Iterable[str]) -> int:
    """Return a bit mask; raises KeyError for an unknown decision."""
    return sum(1 << DECISIONS[word] for word in verdicts)


class EventReader:
    """Read the events of a variant."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        """``descriptors`` are those HANDED_OVER. Raises OSError."""
        specs = map(layout.MONITOR_MAPS.__getitem__, HANDED_OVER)
        events, lost = map(bpf_map.open_map, specs, descriptors)
        with ExitStack() as opened:
            opened.callback(events.close)
            opened.callback(lost.close)
            self._lost, self._ring = lost, Ring(events)
            opened.callback(self._ring.close)
            self._lost_before: int = lost.get(0)[0]
            self._opened = opened.pop_all()

    def take(self) -> list[MonitorEvent]:
        """Return the events since the last call."""
        return self._ring.take_values()

    def lost(self) -> int:
        """Return how many events were lost because the ring buffer was full."""
        return int(self._lost.get(0)[0]) - self._lost_before

    def close(self) -> None:
        self._opened.close()


class Variant:
    """The loaded programs, not attached yet, and the maps of their events."""

    def __init__(self, datapath: Datapath, cache: Path) -> None:
        """Load the programs, all of them here: safe in any thread.

        Raises CompileError, VerifierError, KernelError, NodeError or OSError.
        """
        code = datapath.compile(cache, more=(precompile.MONITOR,))
        with ExitStack() as opened:
            self._maps: dict[str, Map] = {}
            for name, spec in layout.MONITOR_MAPS.items():
                made = self._maps[name] = bpf_map.open_map(spec, state_dir.create_map(spec))
                opened.callback(made.close)
            has_egress = datapath.devices.egress
            maps = {**datapath.maps, **self._maps}
            self.programs = ProgramSet(code, maps, egress=has_egress)
            self.programs.packets(False, egress=has_egress)
            self._opened = opened.pop_all()

    def ask(self, verdicts: int) -> None:
        """Select the reported verdicts, by a bit for each. Raises KernelError."""
        self._maps["monitor"].write([(0, Monitor(verdicts))])

    @property
    def descriptors(self) -> list[int]:
        """What an EventReader needs."""
        return [self._maps[name].fd for name in HANDED_OVER]

    def close(self) -> None:
        """Close everything except the programs, which their owner closes."""
        self._opened.close()
