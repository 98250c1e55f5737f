# SPDX-License-Identifier: Apache-2.0
"""Sweeps of a real kernel's maps: which flows are removed, and what is counted."""

import errno
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.maps import layout, sweep
from ebpflb.kernel.maps.bpf_map import Counters, Map
from ebpflb.kernel.maps.records import Sweep
from ebpflb.kernel.maps.sweep import FlowTable, Sweeper
from ebpflb.model.services import Protocol
from ebpflb.plan.flow_entries import Entries, FlowKind, Hook, Timeouts, chosen_port
from tests.kernel.maps.small import ENTRIES, small_maps
from tests.kernel.variants import eventually, needs_root
from tests.plan.flow_builders import NOW, SECOND, Made

pytestmark = needs_root

CLOSED = ("request seen fin", "request masquerade seen fin", "seen fin", "seen fin")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Map]]:
    """Small maps, at a fixed time."""
    monkeypatch.setattr("ebpflb.kernel.maps.sweep.time.monotonic_ns", lambda: NOW)
    with small_maps((*sweep.FLOW_MAPS, "flow_stats", "sweeps", "flow_gate")) as made:
        yield made


@pytest.fixture
def table(world: dict[str, Map]) -> FlowTable:
    return FlowTable(world, "tcp_flows")


def closed(number: int, idle: int = 121, **kind: Any) -> Entries:
    """A connection that both sides have closed; after two minutes its port need not rest."""
    first = f"{CLOSED[0]} masquerade" if kind.get("masqueraded") else CLOSED[0]
    return Made(number, **kind).entries((first, *CLOSED[1:]), [idle] * 4)


def put(table: FlowTable, *flows: Entries) -> None:
    """Write entries like the datapath, which counts new ones."""
    pairs = [pair for flow in flows for pair in flow.items()]
    new = sum(table.flows.get(key) is None for key, _ in pairs)
    table.flows.write(pairs)
    created, deleted, refused, _ = table.stats.get(table.number)
    set_stats(table, created + new, deleted, refused)


def set_stats(table: FlowTable, *counters: int) -> None:
    stats = table.stats
    assert isinstance(stats, Counters)
    cell = struct.pack("=3Q", *counters).ljust(stats.size, b"\0")
    bpf.map_update(stats.fd, stats.key.pack(table.number), cell)


def run(table: FlowTable) -> Sweep:
    for _ in table.sweep():
        pass
    return table.numbers


def left(table: FlowTable) -> Entries:
    return dict(table.flows.items())


def test_hooks() -> None:
    """The hooks have the numbers of layout.h."""
    assert {hook.value: hook.name.lower() for hook in Hook} == layout.names("hook", "HOOK_")


def test_kinds() -> None:
    """The kinds of entries equal those of the header."""
    assert {kind.value: kind.name.lower() for kind in FlowKind} == layout.names(
        "flow_kind", "FLOW_"
    )


def test_sweep(table: FlowTable) -> None:
    """Expired flows are removed with all their entries; others stay unchanged."""
    due = [closed(n, masqueraded=n % 2 > 0, changed=n % 3 > 0) for n in range(1, 400)]
    keep = [closed(n, idle=29) for n in range(400, 600)] + [Made(1000).plain(3600)]
    put(table, *due, *keep)
    swept, held = sum(map(len, due)), sum(map(len, keep))
    assert swept + held < ENTRIES / 2, "else the LRU may take some"
    assert run(table) == (swept, held, 0)
    assert left(table) == {key: flow for entries in keep for key, flow in entries.items()}


@pytest.mark.parametrize("kind", [{"masqueraded": True}, {"changed": True}], ids=str)
def test_port_of_a_closed_connection_rests(table: FlowTable, kind: dict[str, bool]) -> None:
    """After 30 seconds a closed connection is removed except for its port, after 120 completely."""
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


def test_port_that_another_gets_does_not_rest(table: FlowTable) -> None:
    """If a new flow gets the port while the closed one is removed, the port is the new one's."""
    entries = closed(1, idle=31, masqueraded=True)
    put(table, entries)
    port = chosen_port(entries)
    assert port
    newer = entries[port]._replace(last_seen=NOW, created=NOW, port=4711)
    after(table, 3, lambda: table.flows.write([(port, newer)]))
    run(table)
    assert left(table) == {port: newer}


def test_other_protocols(world: dict[str, Map]) -> None:
    """UDP and SCTP share a map, each with its own timeouts."""
    table = FlowTable(world, "other_flows")
    put(table, *(Made(n, protocol).plain(200) for n, protocol in enumerate(Protocol) if n))
    run(table)
    assert {key.protocol for key in left(table)} == {Protocol.SCTP}
    assert world["sweeps"].get(1) == (2, 2, 0)
    assert world["sweeps"].get(0) == (0, 0, 0)


def test_chosen_timeouts(world: dict[str, Map]) -> None:
    """The operator's timeout applies: an open connection that is idle for longer is removed."""
    put(FlowTable(world, "tcp_flows"), Made(1).plain(60), Made(2).plain(59))
    table = FlowTable(world, "tcp_flows", Timeouts(established=60))
    run(table)
    assert left(table) == Made(2).plain(59)


def after(table: FlowTable, count: int, happens: Callable[[], None]) -> None:
    """Do something after this number of entries was popped."""
    pop, popped = table.flows.pop, list[Any]()

    def slowly(key: Any) -> Any:
        if len(popped) == count:
            happens()
        popped.append(key)
        return pop(key)

    table.flows.pop = slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("part", range(4))
def test_used_meanwhile(table: FlowTable, part: int) -> None:
    """A flow stays whole if any of its entries is used before its turn to be deleted."""
    entries = closed(1, masqueraded=True)
    put(table, entries)
    key = list(entries)[part]
    used = entries[key]._replace(last_seen=NOW + 1)
    after(table, part, lambda: table.flows.write([(key, used)]))
    assert run(table).swept == 0
    assert left(table) == {**entries, key: used}


def test_begun_anew_meanwhile(table: FlowTable) -> None:
    """A new flow with the same ends, opened while the old one is removed, is complete."""
    old = closed(1)
    new = Made(1).plain(0)
    assert old.keys() == new.keys()
    put(table, old)
    after(table, 1, lambda: put(table, new))
    numbers = run(table)
    assert left(table) == new
    assert numbers.evicted == 0
    assert run(table) == (numbers.swept, 2, 0)


def test_gone_meanwhile(table: FlowTable) -> None:
    """An entry that the datapath deleted first does not count as swept."""
    entries = closed(1)
    put(table, entries)
    after(table, 1, lambda: table.flows.delete(list(entries)))
    set_stats(table, 2, 1, 0)
    assert run(table).evicted == 0
    assert run(table) == (1, 0, 0)


@pytest.mark.parametrize("part", range(4))
def test_killed_meanwhile(table: FlowTable, part: int) -> None:
    """Entries that a killed agent had deleted do not count as evicted for the next agent."""

    def die() -> None:
        raise KeyboardInterrupt

    pop = table.flows.pop
    put(table, closed(1, masqueraded=True))
    after(table, part, die)
    with pytest.raises(KeyboardInterrupt):
        run(table)
    table.flows.pop = pop  # type: ignore[method-assign]
    assert run(table).evicted == 0
    assert left(table) == {}


def refuse(number: int) -> Callable[..., Any]:
    def refused(*_arguments: Any, **_options: Any) -> Any:
        raise KernelError("map", number, os.strerror(number))

    return refused


@pytest.mark.parametrize("number", [bpf.ENOTSUPP, errno.EINVAL])
def test_older_kernels(table: FlowTable, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Without the commands for batches and look-up-and-delete, the same flows are removed."""
    look_up = bpf.map_lookup

    def without_delete(*words: Any, delete: bool = False) -> Any:
        return refuse(number)() if delete else look_up(*words)

    monkeypatch.setattr(bpf, "map_lookup", without_delete)
    monkeypatch.setattr(bpf, "map_lookup_batch", refuse(number))
    keep = Made(1000).plain(0)
    put(table, keep, *(closed(n, masqueraded=True) for n in range(1, 301)))
    run(table)
    assert left(table) == keep
    assert run(table) == (1200, 2, 0)


def test_evicted(table: FlowTable) -> None:
    """Evicted entries follow from those created, deleted, swept and left; the sum never falls."""
    put(table, *(Made(n).plain(0) for n in range(1, ENTRIES)))
    held = len(left(table))
    evicted = 2 * (ENTRIES - 1) - held
    assert evicted >= ENTRIES - 2
    assert run(table) == (0, held, evicted)
    set_stats(table, 2 * (ENTRIES - 1), 10, 0)
    assert run(table) == (0, held, evicted)


def test_in_flux(table: FlowTable) -> None:
    """Flows that are opened and closed during a sweep do not count as evicted."""
    put(table, *(Made(n).plain(0) for n in range(1, 500)))
    for step, _ in enumerate(table.sweep()):
        put(table, *(Made(n).plain(0) for n in range(1000 + 50 * step, 1050 + 50 * step)))
        table.flows.delete(list(Made(step + 1).plain(0)))
        created, deleted, _, _ = table.stats.get(table.number)
        set_stats(table, created, deleted + 2, 0)
    assert table.numbers.evicted == 0
    assert run(table) == (0, len(left(table)), 0)


def test_counted_by_others(table: FlowTable) -> None:
    """Flows that an operator flushes count as swept, not as evicted."""
    entries = Made(1).plain(0)
    put(table, entries, Made(2).plain(0))
    table.count(len(table.remove(entries)))
    assert run(table) == (2, 2, 0)


def test_thread(world: dict[str, Map], table: FlowTable) -> None:
    """The thread sweeps both maps until it is stopped; then no map is in use any more."""
    other = FlowTable(world, "other_flows")
    put(table, closed(1))
    put(other, Made(2, Protocol.UDP).plain(3600))
    sweeper = Sweeper(world)
    sweeper.start()
    assert eventually(lambda: table.numbers.swept == other.numbers.swept == 2)
    sweeper.stop()
    assert not sweeper.thread.is_alive()


def test_failure(world: dict[str, Map], caplog: pytest.LogCaptureFixture) -> None:
    """A sweep that fails is logged and does not end the thread."""
    sweeper = Sweeper(world)
    sweeper.tables[0].flows.slices = refuse(errno.EPERM)  # type: ignore[method-assign]
    sweeper.start()
    assert eventually(lambda: "sweeping flows failed" in caplog.text)
    assert sweeper.thread.is_alive()
    sweeper.stop()


def test_never_started(world: dict[str, Map]) -> None:
    """A thread that was not started can be stopped."""
    Sweeper(world).stop()
