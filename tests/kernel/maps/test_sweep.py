# SPDX-License-Identifier: Apache-2.0
"""Sweeps of a real kernel's maps: removed flows, and counts."""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpflb.entries.flows import Entries, FlowKind, Hook, Timeouts, chosen_port
from ebpflb.kernel import bpf
from ebpflb.kernel.maps import layout, sweep
from ebpflb.kernel.maps.bpf_map import Counters, Map
from ebpflb.kernel.maps.records import Sweep
from ebpflb.kernel.maps.sweep import EndFlow, Sweeper, SweptTable
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import FrameProgram
from ebpflb.model.services import Protocol
from tests.kernel.maps.small import ENTRIES, small_maps
from tests.kernel.variants import eventually, needs_root, open_files
from tests.plan.flow_builders import NOW, SECOND, Made

pytestmark = needs_root

CLOSED = ("request seen fin", "request masquerade seen fin", "seen fin", "seen fin")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Map]]:
    """Return small maps, at a fixed time."""
    monkeypatch.setattr("ebpflb.kernel.maps.sweep.time.monotonic_ns", lambda: NOW)
    with small_maps((*sweep.FLOW_MAPS, "flow_stats", "sweeps", "flow_gate")) as made:
        yield made


@pytest.fixture
def end_flow(world: dict[str, Map], cache: Path) -> Iterator[EndFlow]:
    program = FrameProgram(precompile.FLOW_END, world, cache)
    yield program.run
    program.close()


def test_the_program_leaves_nothing_open(world: dict[str, Map], cache: Path) -> None:
    """The program is loaded when it is first needed, and closed with the agent."""
    before, program = open_files(), FrameProgram(precompile.FLOW_END, world, cache)
    program.run(bytes(64))
    assert open_files() == before + 1
    program.close()
    assert open_files() == before


@pytest.fixture
def table(world: dict[str, Map], end_flow: EndFlow) -> SweptTable:
    return SweptTable(world, "tcp_flows", Timeouts(), end_flow)


def closed(number: int, idle: int = 121, **kind: Any) -> Entries:
    """Return a connection that both sides have closed; after two minutes its port is free."""
    first = f"{CLOSED[0]} masquerade" if kind.get("masqueraded") else CLOSED[0]
    return Made(number, **kind).entries((first, *CLOSED[1:]), [idle] * 4)


def put(table: SweptTable, *flows: Entries) -> None:
    """Write entries as the datapath does, which counts new ones."""
    pairs = [pair for flow in flows for pair in flow.items()]
    new = sum(table.flows.get(key) is None for key, _ in pairs)
    table.flows.write(pairs)
    created, deleted, refused, _ = table.stats.get(table.number)
    set_stats(table, created + new, deleted, refused)


def set_stats(table: SweptTable, *counters: int) -> None:
    stats = table.stats
    assert isinstance(stats, Counters)
    cell = struct.pack("=3Q", *counters).ljust(stats.size, b"\0")
    bpf.map_update(stats.fd, stats.key.pack(table.number), cell)


def run(table: SweptTable) -> Sweep:
    for _ in table.sweep():
        pass
    return table.numbers


def left(table: SweptTable) -> Entries:
    return dict(table.flows.items())


def test_hooks_have_the_numbers_of_the_header() -> None:
    """The hooks have the numbers of layout.h."""
    assert {hook.value: hook.name.lower() for hook in Hook} == layout.names("hook", "HOOK_")


def test_kinds_equal_those_of_the_header() -> None:
    assert {kind.value: kind.name.lower() for kind in FlowKind} == layout.names(
        "flow_kind", "FLOW_"
    )


def test_expired_flows_are_removed_whole(table: SweptTable) -> None:
    """Expired flows are removed with all their entries; other flows stay unchanged."""
    due = [closed(n, masqueraded=n % 2 > 0, changed=n % 3 > 0) for n in range(1, 400)]
    keep = [closed(n, idle=29) for n in range(400, 600)] + [Made(1000).plain(3600)]
    put(table, *due, *keep)
    swept, held = sum(map(len, due)), sum(map(len, keep))
    assert swept + held < ENTRIES / 2, "else the LRU may take some"
    assert run(table) == (swept, held, 0)
    assert left(table) == {key: flow for entries in keep for key, flow in entries.items()}


@pytest.mark.parametrize("kind", [{"masqueraded": True}, {"changed": True}], ids=str)
def test_port_of_a_closed_connection_rests(table: SweptTable, kind: dict[str, bool]) -> None:
    """A closed connection is removed after 30 seconds, except for its port, which is removed after
    120.
    """
    entries = closed(1, idle=31, **kind)
    put(table, entries)
    port = chosen_port(entries)
    assert port
    assert run(table) == (len(entries) - 1, 1, 0)
    resting = left(table)[port]
    assert left(table) == {port: entries[port]._replace(kind=FlowKind.RESTING)}
    assert run(table) == (len(entries) - 1, 1, 0)
    table.flows.write([(port, resting._replace(last_seen=NOW - 121 * SECOND))])
    assert run(table) == (len(entries), 0, 0)


def meanwhile(table: SweptTable, happens: Callable[[], object]) -> None:
    """Do something once, between finding the next expired flow and removing it."""
    end_flow = table.end_flow

    def later(data: bytes) -> int:
        table.end_flow = end_flow
        happens()
        return end_flow(data)

    table.end_flow = later


@pytest.mark.parametrize("part", range(4))
def test_used_meanwhile(table: SweptTable, part: int) -> None:
    """A flow stays whole if any of its entries is used before it is removed."""
    entries = closed(1, masqueraded=True)
    put(table, entries)
    key = list(entries)[part]
    used = entries[key]._replace(last_seen=NOW + 1)
    meanwhile(table, lambda: table.flows.write([(key, used)]))
    assert run(table).swept == 0
    assert left(table) == {**entries, key: used}


def test_begun_anew_meanwhile(table: SweptTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new flow with the same addresses and ports, opened before the old one is removed, stays
    complete.
    """
    old, new = closed(1), Made(1).plain(0)
    assert old.keys() == new.keys()
    put(table, old)
    count, call, calls = table.count, bpf.bpf, list[int]()

    def open_anew(removed: int) -> None:
        monkeypatch.setattr(table, "count", count)
        put(table, new)
        monkeypatch.setattr(bpf, "bpf", watched)
        count(removed)

    def watched(command: int, *words: Any) -> Any:
        result = call(command, *words)
        with monkeypatch.context() as patch:
            patch.setattr(bpf, "bpf", call)
            assert left(table) == new
        calls.append(command)
        return result

    monkeypatch.setattr(table, "count", open_anew)
    numbers = run(table)
    assert calls
    assert left(table) == new
    assert numbers.evicted == 0
    assert run(table) == (numbers.swept, 2, 0)


def test_gone_meanwhile(table: SweptTable) -> None:
    """Entries that the datapath deleted first do not count as swept."""
    entries = closed(1)
    put(table, entries)
    meanwhile(table, lambda: table.flows.delete(list(entries)[1:]))
    set_stats(table, 2, 1, 0)
    assert run(table).evicted == 0
    assert run(table) == (1, 0, 0)


@pytest.mark.parametrize("removed", [False, True])
def test_killed_meanwhile(table: SweptTable, removed: bool) -> None:
    """Entries that a killed agent deleted are not counted as evicted by the next agent."""
    end_flow = table.end_flow

    def die(data: bytes) -> int:
        if removed:
            end_flow(data)
        raise KeyboardInterrupt

    put(table, closed(1, masqueraded=True))
    table.end_flow = die
    with pytest.raises(KeyboardInterrupt):
        run(table)
    assert bool(left(table)) is not removed
    table.end_flow = end_flow
    assert run(table).evicted == 0
    assert left(table) == {}


def test_evictions_are_counted_from_the_rest(table: SweptTable) -> None:
    """The number of evicted entries follows from the numbers created, deleted, swept and left; it
    never falls.
    """
    put(table, *(Made(n).plain(0) for n in range(1, ENTRIES)))
    held = len(left(table))
    evicted = 2 * (ENTRIES - 1) - held
    assert evicted >= ENTRIES - 2
    assert run(table) == (0, held, evicted)
    set_stats(table, 2 * (ENTRIES - 1), 10, 0)
    assert run(table) == (0, held, evicted)


def test_the_thread_sweeps_until_it_is_stopped(
    world: dict[str, Map], table: SweptTable, end_flow: EndFlow
) -> None:
    """The thread sweeps both maps until it is stopped; afterwards it uses no map."""
    other = SweptTable(world, "other_flows", Timeouts(), end_flow)
    put(table, closed(1))
    put(other, Made(2, Protocol.UDP).plain(3600))
    sweeper = Sweeper(world, Timeouts(), end_flow)
    sweeper.start()
    assert eventually(lambda: table.numbers.swept == other.numbers.swept == 2)
    sweeper.stop()
    assert not sweeper.thread.is_alive()
