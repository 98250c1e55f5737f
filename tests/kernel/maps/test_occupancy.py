# SPDX-License-Identifier: Apache-2.0
"""Counts of the entries of a real kernel's LRU maps: what is counted, and when."""

from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.entries.services import BackendLoad
from ebpflb.errors import KernelError
from ebpflb.kernel.maps import layout, occupancy
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.occupancy import COUNTED_MAPS, Occupancy
from ebpflb.kernel.maps.records import Affinity, AffinityKey
from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.model.services import Protocol
from tests.kernel.maps.small import small_maps
from tests.kernel.variants import needs_root
from tests.kit.failing import Failing
from tests.plan.flow_builders import Made

pytestmark = needs_root


@pytest.fixture
def world() -> Iterator[dict[str, Map]]:
    """Small maps."""
    with small_maps((*COUNTED_MAPS, *FLOW_MAPS, "backend_loads")) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the monotonic clock."""
    now = [0.0]
    monkeypatch.setattr("ebpflb.kernel.maps.occupancy.time.monotonic", lambda: now[0])
    return lambda time: now.__setitem__(0, time)


def counted(counter: Occupancy) -> occupancy.Counts:
    counter.latest()
    counter.wait()
    return counter.latest()


def test_every_map_of_programs_is_counted() -> None:
    """Every map that programs fill is counted, here or by the sweeper: LRU maps and others."""
    every = {name for name, spec in layout.MAPS.items() if spec.kind == "LRU_HASH"}
    assert {*COUNTED_MAPS, *FLOW_MAPS} == every | {"socket_places", "sockets", "connections"}
    assert {"affinity", "assignments", "peers", "fragments"} <= set(COUNTED_MAPS)


def test_entries(world: dict[str, Map], clock: Any) -> None:
    """Entries are counted for each map, in more than one slice."""
    clients = [AffinityKey(0, ip_address("10.0.0.0") + number, 1) for number in range(1500)]
    world["affinity"].write([(client, Affinity(1, 1)) for client in clients])
    assert counted(Occupancy(world)).entries == dict.fromkeys(COUNTED_MAPS, 0) | {"affinity": 1500}


def test_connections_that_were_not_counted(world: dict[str, Map], clock: Any) -> None:
    """Uncounted connections of all backends are summed over several slices."""
    loads = [(id, BackendLoad(open=9, generation=8, uncounted=1)) for id in range(0, 4096, 4)]
    world["backend_loads"].write(loads)
    assert counted(Occupancy(world)).uncounted == 1024


def test_flows(world: dict[str, Map], clock: Any) -> None:
    """Each flow of two or four entries counts once, by its protocol."""
    made = {
        Protocol.TCP: [Made(n, masqueraded=n % 2 == 0) for n in range(5)],
        Protocol.UDP: [Made(n, Protocol.UDP, masqueraded=True) for n in range(3)],
        Protocol.SCTP: [Made(9, Protocol.SCTP)],
    }
    for table, protocols in FLOW_MAPS.items():
        for flow in (flow for protocol in protocols for flow in made[protocol]):
            world[table].write(list(flow.plain().items()))
    assert counted(Occupancy(world)).flows == {p: len(flows) for p, flows in made.items()}


def test_once_a_minute_and_only_if_asked(world: dict[str, Map], clock: Any) -> None:
    """There are no counts at first; later ones are returned until they are a minute old."""
    counter = Occupancy(world)
    assert counter.latest() == occupancy.NO_COUNTS
    counter.wait()
    first = counter.latest()
    assert first.entries
    world["affinity"].write([(AffinityKey(0, ip_address("10.0.0.1"), 1), Affinity(1, 1))])
    clock(occupancy.COUNT_INTERVAL - 1)
    assert counted(counter) == first
    clock(occupancy.COUNT_INTERVAL)
    assert counted(counter).entries["affinity"] == 1


def test_what_cannot_be_read_is_logged(
    world: dict[str, Map], clock: Any, monkeypatch: pytest.MonkeyPatch, failing: Failing
) -> None:
    """A count that fails is a condition, and the last one stays."""
    counter = Occupancy(world)
    before = counted(counter)

    def refuse(*_: object) -> None:
        raise KernelError("map batch look-up", 1, "not permitted")

    monkeypatch.setattr(Map, "slices", refuse)
    clock(occupancy.COUNT_INTERVAL)
    assert counted(counter) == before
    assert [each.part for each in failing.told] == ["maps"]
