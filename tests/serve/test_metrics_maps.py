# SPDX-License-Identifier: Apache-2.0
"""Metrics read from real maps, and their cost, whatever the maps hold."""

from collections.abc import Iterator
from dataclasses import fields
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Any

import pytest

from ebpflb.entries.services import BackendName, Frontend, service_range
from ebpflb.kernel import bpf as kernel
from ebpflb.kernel.map_writer import CAPACITY
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import Sweep
from ebpflb.model.services import Protocol
from ebpflb.plan.desired import DesiredBackend, DesiredService
from ebpflb.plan.planner import Planner
from ebpflb.serve.metrics import COUNTED_WHOLE, Metrics
from tests.kernel.conftest import cgroup as cgroup
from tests.kernel.conftest import cgroups as cgroups
from tests.kernel.conftest import directory as directory
from tests.kernel.conftest import home as home
from tests.kernel.conftest import one_variant as one_variant
from tests.kernel.maps import small
from tests.kernel.variants import needs_root
from tests.plan.builders import CLUSTER, RESTRICTED, name
from tests.serve.subjects import changes, sources, value, values
from tests.tools.conftest import count

pytestmark = needs_root


@pytest.fixture
def world() -> Iterator[dict[str, Map]]:
    """Return every map of the datapath, unpinned."""
    with small.all_maps() as made:
        yield made


@pytest.fixture
def planner() -> Planner:
    return Planner(CAPACITY)


@pytest.fixture
def metrics(world: dict[str, Map], planner: Planner) -> Iterator[Metrics]:
    made = Metrics()
    made.read(sources(world, lambda: planner))
    yield made
    made.close()


def use(made: Metrics, name: str) -> float:
    return value(made, "ebpflb_map_entries", map=name)


def service(number: int) -> DesiredService:
    """Return a service with two frontends, one of them restricted, and ten endpoints."""
    backends = [
        DesiredBackend(IPv4Address(10 << 24 | number << 4 | n), 80, CLUSTER, BackendName("", ""))
        for n in range(10)
    ]
    inside, outside = (
        Frontend(IPv4Address(first) + number, 80, Protocol.TCP)
        for first in ("172.16.0.0", "198.18.0.0")
    )
    found = {inside: frozenset({"endpoints"}), outside: RESTRICTED}
    ranges = (ip_network("192.0.2.0/24"),)
    return DesiredService(name(f"web-{number}"), "", found, 0, tuple(backends), ranges)


def program(world: dict[str, Map], planner: Planner, services: int) -> None:
    """Plan and write this many services."""
    plan = planner.plan_changes({s.name: s for s in map(service, range(services))}, 0.0)
    for part in fields(plan):
        if part.name in world:
            world[part.name].write(getattr(plan, part.name))
    planner.written(0.0)


def test_each_verdict_has_its_counter(world: dict[str, Map], metrics: Metrics) -> None:
    """Each verdict of layout.h has its counter."""
    before = values(metrics)
    for number in layout.VERDICTS:
        count(world["verdicts"], number, number + 1)
    found = changes(metrics, before)
    assert found == {"ebpflb_verdicts_total": {name: n + 1 for n, name in layout.VERDICTS.items()}}


def test_each_limited_map_has_use_and_size(metrics: Metrics) -> None:
    """Every map that can become full has its use and size; a map of one element has neither."""
    found = values(metrics)
    sizes = {
        dict(labels)["map"]: v for (n, labels), v in found.items() if n == "ebpflb_map_max_entries"
    }
    used = {dict(labels)["map"] for (n, labels) in found if n == "ebpflb_map_entries"}
    planned = {"services", "slots", "choices", "backend_slots", "source_ranges", "cluster_ips"}
    small = {*COUNTED_WHOLE, "tcp_flows", "other_flows", "sockets"}
    assert used == sizes.keys() == planned | small | {"service_stats"}
    assert all(size == layout.MAPS[each].entries for each, size in sizes.items())


def test_what_the_planner_gave_away(
    world: dict[str, Map], planner: Planner, metrics: Metrics
) -> None:
    """The use of the agent's maps is exact at once."""
    program(world, planner, 3)
    expected = {"services": 6, "slots": 30, "backend_slots": 30, "service_stats": 3}
    expected |= {"source_ranges": 3, "cluster_ips": 3}
    assert {each: use(metrics, each) for each in expected} == expected
    for each in ("services", "source_ranges", "cluster_ips"):
        assert len(list(world[each].items())) == expected[each]
    planner.plan_changes({service(0).name: None}, 1.0)
    assert (use(metrics, "services"), use(metrics, "slots")) == (4, 30)  # the slots rest


def test_small_maps_are_walked(world: dict[str, Map], metrics: Metrics) -> None:
    """Small maps are read at the scrape."""
    world["node_addresses"].write([(ip_address(f"192.0.2.{n}"), 1) for n in range(3)])
    world["service_ranges"].write([(service_range(ip_network("10.96.0.0/16")), 1)])
    assert (use(metrics, "node_addresses"), use(metrics, "service_ranges")) == (3, 1)
    assert use(metrics, "devices") == 0


def test_flow_entries(world: dict[str, Map], metrics: Metrics) -> None:
    """Events are exact; current and evicted entries are from the last sweep."""
    before = values(metrics)
    count(world["flow_stats"], 1, 50, 5, 4, 7)
    world["sweeps"].write([(1, Sweep(30, 12, 3))])
    found = changes(metrics, before)
    outcomes = {"created": 50, "deleted": 5, "refused": 4, "swept": 30, "evicted": 3}
    expected = {f"ebpflb_flow_entries_{f}_total": {"other_flows": n} for f, n in outcomes.items()}
    expected["ebpflb_half_open_flows_displaced_total"] = {"other_flows": 7}
    assert found == expected | {"ebpflb_map_entries": {"other_flows": 12}}


def test_programs_count_the_entries_of_sockets(world: dict[str, Map], metrics: Metrics) -> None:
    """The programs count the entries of map `sockets`."""
    world["sockets_full"].write([(0, (3, 4, 70))])
    assert use(metrics, "sockets") == 70


def test_scrape_costs_the_same_whatever_is_programmed(
    world: dict[str, Map], planner: Planner, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1,000 services and 10,000 endpoints a scrape makes as many calls, and shows as many
    series, as without any.
    """
    calls: list[str] = []
    bpf = kernel.bpf

    def counted(command: int, what: str, attr: Any) -> int:
        calls.append(what)
        return bpf(command, what, attr)

    monkeypatch.setattr(kernel, "bpf", counted)
    series = values(metrics).keys()
    empty, calls[:] = list(calls), []
    monkeypatch.setattr(kernel, "bpf", bpf)
    program(world, planner, 1000)
    monkeypatch.setattr(kernel, "bpf", counted)
    assert values(metrics).keys() == series
    assert calls == empty
    assert 18 <= len(calls) <= 45
    assert use(metrics, "slots") == 10_000
