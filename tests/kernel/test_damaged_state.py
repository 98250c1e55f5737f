# SPDX-License-Identifier: Apache-2.0
"""Whatever is in the maps and the state directory, an agent starts, names the damage and repairs
it.
"""

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from ebpflb.kernel import bpf
from ebpflb.kernel.map_writer import CAPACITY, MapWriter
from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.plan.planner import Planner
from tests.load import scaled
from tests.plan import builders

HASHES = ("services", "service_names", "backend_names", "source_ranges", "cluster_ips")
ARRAYS = ("slots", "backend_slots", "service_places")


@pytest.fixture(scope="module")
def maps() -> Iterator[dict[str, Map]]:
    """Return maps that are not pinned."""
    made = {n: bpf_map.open_map(s, state_dir.create_map(s)) for n, s in layout.MAPS.items()}
    yield made
    for each in made.values():
        each.close()


@pytest.fixture(autouse=True)
def empty(maps: dict[str, Map]) -> None:
    clear(maps)


def clear(maps: dict[str, Map]) -> None:
    for name in HASHES:
        for key, _ in list(maps[name].packed_items()):
            bpf.map_delete(maps[name].fd, key)
    for name in ARRAYS:
        array: Any = maps[name]
        array.memory[: 4096 * 4] = bytes(4096 * 4)


def start(maps: dict[str, Map]) -> Planner:
    """Start as an agent does, with two services; then check the maps."""
    writer = MapWriter(maps)
    planner = Planner(CAPACITY, writer.read_contents())
    desired = {each.name: each for each in DESIRED}
    for now in (0.0, 2.0, 4.0, 6.0):
        writer.apply(planner.plan_everything(desired, now))
        planner.written(now)
    return planner


DESIRED = [
    builders.desired("web", [1, 2], [1, 2, 3]),
    builders.desired("dns", [3], [4], flags=builders.RESTRICTED, source_ranges=[builders.FIRST]),
]


def assert_right(maps: dict[str, Map], planner: Planner) -> None:
    """Each frontend leads to its service's backends, and no other entry is left."""
    services = dict(maps["services"].items())
    assert maps["service_places"].count() == len(services)
    assert services.keys() == {frontend for each in DESIRED for frontend in each.frontends}
    for desired in DESIRED:
        for frontend in desired.frontends:
            entry = services[frontend]
            slots = [maps["slots"].get(entry.cluster.base + at) for at in range(entry.slots)]
            assert [(b.address, b.port) for b in slots] == [
                (b.address, b.port) for b in desired.backends
            ]
            assert {b.service for b in slots} == {entry.id}
            where = [maps["backend_slots"].get(b.id) for b in slots]
            assert where == list(range(entry.cluster.base, entry.cluster.base + entry.slots))
    names = dict(maps["service_names"].items())
    assert sorted(names.values()) == sorted(each.name for each in DESIRED)
    ids = {id for entries in planner.actual.values() for id in entries.ids}
    assert dict(maps["backend_names"].items()).keys() == ids
    for name in HASHES:
        opened = maps[name]
        raw = [key for key, _ in opened.packed_items()]
        assert [opened.key.pack(opened.key.unpack(key)) for key in raw] == raw


numbers = some.one_of(some.integers(0, 2**32 - 1), some.integers(0, 8))


@some.composite
def damages(draw: some.DrawFn) -> tuple[str, int, bytes, int]:
    """Return a map, the place of an entry, and a number to write somewhere into it."""
    name = draw(some.sampled_from(HASHES + ARRAYS))
    spec = layout.MAPS[name]
    in_key = name in HASHES and draw(some.booleans())
    size = spec.key_size if in_key else spec.value_size
    at = draw(some.integers(0, max(0, size - 4)))
    return name, draw(some.integers(0, 5)), struct.pack("=I", draw(numbers)), at if in_key else ~at


def damage(maps: dict[str, Map], name: str, which: int, number: bytes, place: int) -> None:
    opened: Any = maps[name]
    if name in ARRAYS:
        at = which * opened.stride + ~place
        opened.memory[at : at + 4] = number[: opened.size - ~place]
        return
    entries = sorted(opened.packed_items())
    if not entries:
        return
    parts = list(map(bytearray, entries[which % len(entries)]))
    part, at = (parts[0], place) if place >= 0 else (parts[1], ~place)
    part[at : at + 4] = number[: len(part) - at]
    if name == "source_ranges":
        parts[0][:4] = struct.pack("=I", min(192, int.from_bytes(parts[0][:4], "little")))
    bpf.map_update(opened.fd, bytes(parts[0]), bytes(parts[1]))


@given(done=some.lists(damages(), min_size=1, max_size=6))
@settings(
    max_examples=scaled(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_content_of_the_maps(
    maps: dict[str, Map], done: list[tuple[str, int, bytes, int]]
) -> None:
    """After a start the maps are correct, whatever was in them."""
    clear(maps)
    start(maps)
    for each in done:
        damage(maps, *each)
    assert_right(maps, start(maps))


def test_out_of_range_content_is_named(
    maps: dict[str, Map], caplog: pytest.LogCaptureFixture
) -> None:
    """One line names its map and key."""
    start(maps)
    assert not caplog.messages
    key, value = next(iter(maps["services"].items()))
    far = value._replace(cluster=value.cluster._replace(base=2**31), slots=2**31)
    maps["services"].write([(key, far)])
    maps["service_names"].write([(2**32 - 1, builders.name("far"))])
    assert_right(maps, start(maps))
    first, second = caplog.messages
    assert first.startswith("map services: 1 invalid entries removed (first key ")
    assert maps["services"].key.pack(key).hex() in first
    assert second.startswith("map service_names: 1 invalid entries removed")


def test_counts_of_writes_begin_again(maps: dict[str, Map]) -> None:
    """A damaged count at the maximum of its field does not end the agent."""
    found = maps["settings"].get(0)
    maps["settings"].write([(0, found._replace(writes=2**64 - 1, frontend_moves=2**32 - 1))])
    assert_right(maps, start(maps))
    after = maps["settings"].get(0)
    assert after.writes % 2 == 0 and after.frontend_moves > 0
