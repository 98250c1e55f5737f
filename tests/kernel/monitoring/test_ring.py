# SPDX-License-Identifier: Apache-2.0
"""Events of packets in a ring buffer are immediate, in order, bounded and counted."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ebpflb.kernel import monitoring
from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.kernel.maps.readers import Ring
from ebpflb.kernel.maps.records import Monitor
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.kernel.programs.loader import Program

SMALL = 4096  # bytes: 32 events
FRAME = bytes(12) + b"\x08\x00" + b"\x45" + bytes(50)  # a malformed packet


class Watched:
    """The monitored program at ingress, with a small ring."""

    def __init__(self, maps: dict[str, Map], program: Program) -> None:
        self.maps, self._program = maps, program
        self.ring = Ring(maps["events"])

    def ask(self, *verdicts: str) -> None:
        self.maps["monitor"].write([(0, Monitor(monitoring.decision_mask(verdicts)))])

    def run(self, times: int) -> None:
        loader.run_program(self._program.fd, FRAME, repeat=times)

    def lost(self) -> int:
        (count,) = self.maps["events_lost"].get(0)
        return int(count)


@pytest.fixture
def watched(all_maps: dict[str, Map], cache: Path) -> Iterator[Watched]:
    flags = precompile.VARIANTS["hooks/packet.c"]["monitoring"]
    compiled = compiler.compile_source("hooks/packet.c", flags, cache=cache)
    with ExitStack() as opened:
        maps = dict(all_maps)
        for name, spec in layout.MONITOR_MAPS.items():
            its = spec._replace(entries=SMALL) if name == "events" else spec
            maps[name] = bpf_map.open_map(its, state_dir.create_map(its))
            opened.callback(maps[name].close)
        programs = loader.load(compiled, maps)
        opened.callback(loader.close, programs)
        made = Watched(maps, next(it for it in programs if it.name == "ingress"))
        opened.callback(made.ring.close)
        yield made


def test_only_what_is_asked_for_is_told(watched: Watched) -> None:
    """Only requested verdicts give events, in order, and none before the request."""
    watched.run(3)
    watched.ask("refused")
    watched.run(3)
    assert watched.ring.take() == b""
    watched.ask("malformed", "passed")
    watched.run(3)
    found = watched.ring.take_values()
    assert [VERDICTS[it.verdict] in ("malformed", "passed") for it in found] == [True] * 3
    assert {monitoring.HOOKS[it.hook] for it in found} == {"ingress"}
    assert [it.time for it in found] == sorted(it.time for it in found)
    assert watched.ring.take() == b""


def test_a_full_ring_loses_events_and_counts_them(watched: Watched) -> None:
    """Events plus losses equal all decisions, even when the ring wraps around."""
    watched.ask(*monitoring.DECISIONS)
    told = 0
    for turn in range(1, 8):
        watched.run(20)
        told += len(watched.ring.take_values())
        assert (told, watched.lost()) == (20 * turn, 0)
    watched.run(100)
    told = len(watched.ring.take_values())
    assert 0 < told <= SMALL // watched.ring.stride
    assert told + watched.lost() == 100
    watched.run(5)
    assert len(watched.ring.take_values()) == 5


def test_what_can_be_asked_for() -> None:
    """Every verdict that ends a decision can be requested, and no other value of the enum."""
    assert set(monitoring.DECISIONS) == set(VERDICTS.values()) - {"retried", "s"}
    assert set(monitoring.DECISIONS) == monitoring.USUAL | monitoring.FREQUENT
    assert "translated" in monitoring.USUAL and "passed" not in monitoring.USUAL
