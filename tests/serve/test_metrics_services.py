# SPDX-License-Identifier: Apache-2.0
"""Series of single service ports: what is counted, which ports have series, what bounds their
number.
"""

from collections.abc import Iterator
from dataclasses import fields
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.entries.services import BackendName, Frontend
from ebpflb.kernel.map_writer import CAPACITY
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.model.addresses import Family
from ebpflb.model.events import Key
from ebpflb.model.services import PortName, Protocol
from ebpflb.options import parse_series
from ebpflb.plan.desired import DesiredBackend, DesiredService
from ebpflb.plan.planner import Planner
from ebpflb.serve import metrics
from ebpflb.serve.metrics import Metrics
from tests.kernel.maps import small
from tests.kernel.variants import needs_root
from tests.plan.builders import CLUSTER
from tests.serve.subjects import sources, values
from tests.tools.conftest import count

pytestmark = needs_root

NEW, REFUSED = "ebpflb_service_connections_total", "ebpflb_service_refused_total"
WITHOUT = "ebpflb_service_ports_without_series"


class World:
    """The maps, a planner, and labels; a test sets ``now``."""

    def __init__(self, maps: dict[str, Map]) -> None:
        self.maps, self.planner = maps, Planner(CAPACITY)
        self.labels: dict[Key, str] = {}
        self.now = 1000.0

    def program(self, *services: DesiredService) -> None:
        self._write({each.name: each for each in services})

    def remove(self, service: DesiredService) -> None:
        self._write({service.name: None})

    def _write(self, changes: dict[PortName, DesiredService | None]) -> None:
        plan = self.planner.plan_changes(changes, self.now)
        for part in fields(plan):
            if part.name in self.maps:
                self.maps[part.name].write(getattr(plan, part.name))
        self.planner.written(self.now)

    def count(self, service: DesiredService, *counters: int) -> None:
        """Add to the counters: chosen, by affinity, refused, no local endpoint."""
        count(self.maps["service_stats"], self.planner.actual[service.name].id, *counters)

    def metrics(self, series: str) -> Metrics:
        made = Metrics()
        made.read(
            sources(self.maps, lambda: self.planner)._replace(
                series=parse_series(series), labels_of=lambda key: self.labels.get(key, "")
            )
        )
        return made


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with small.all_maps() as maps:
        made = World(maps)
        monkeypatch.setattr("ebpflb.serve.metrics.time.monotonic", lambda: made.now)
        yield made


def service(name: str, number: int, family: Family = Family.IPV4) -> DesiredService:
    """Return a Service with two endpoints."""
    first = "10.1.0.0" if family == Family.IPV4 else "fd00:1::"
    at = "172.16.0.0" if family == Family.IPV4 else "fd00:96::"
    backends = [
        DesiredBackend(ip_address(first) + 2 * number + n, 80, CLUSTER, BackendName("", ""))
        for n in range(2)
    ]
    frontends = {Frontend(ip_address(at) + number, 80, Protocol.TCP): frozenset({"endpoints"})}
    port = PortName("shop", name, "http", Protocol.TCP, family)
    return DesiredService(port, "", frontends, 0, tuple(backends), ())


def series(made: Metrics, metric: str) -> dict[str, float]:
    """Return the value by the Service's name, and by the further label if there is one."""
    found = {}
    for (name, labels), now in values(made).items():
        if name == metric:
            words = dict(labels)
            more = words.get("verdict")
            found[f"{words['name']} {more}" if more else words["name"]] = now
    return found


def test_what_was_counted_is_shown(world: World) -> None:
    """Both families of a service port are one series; refusals are labelled with their verdict."""
    v4, v6 = service("web", 1), service("web", 1, Family.IPV6)
    world.program(v4, v6)
    made = world.metrics("5")
    world.count(v4, 30, 4, 3, 2)
    world.count(v6, 12, 0, 0, 1)
    assert series(made, NEW) == {"web": 42}
    assert series(made, REFUSED) == {"web refused": 3, "web no_local_endpoint": 3}
    labels = {"namespace": "shop", "name": "web", "port": "http", "protocol": "TCP"}
    assert (NEW, frozenset(labels.items())) in values(made)
    world.count(v4, 31)
    assert series(made, NEW) == {"web": 43}  # at once, whenever the choice was made
    made.close()


def test_the_choice_follows_what_is_busy(world: World) -> None:
    """The busiest have series, and how many have none is told. The choice is made at most once a
    minute.
    """
    a, b = service("a", 1), service("b", 2)
    world.program(a, b)
    world.count(a, 10)
    made = world.metrics("1")
    assert series(made, NEW) == {"a": 10}
    assert values(made)[WITHOUT, frozenset()] == 1
    world.count(b, 1000)
    world.now += metrics.CHOICE_INTERVAL - 1
    assert series(made, NEW) == {"a": 10}
    world.now += 1
    assert series(made, NEW) == {"b": 1000}
    made.close()


def test_labels_select(world: World) -> None:
    """Only Services whose labels match the selector have series, however busy other Services
    are.
    """
    shown, other = service("shown", 1), service("other", 2)
    world.program(shown, other)
    world.count(other, 1000)
    world.labels = {Key("shop", "shown"): "metrics=on,tier=web", Key("shop", "other"): "tier=web"}
    made = world.metrics("5,metrics=on")
    assert series(made, NEW) == {"shown": 0}
    assert values(made)[WITHOUT, frozenset()] == 0
    world.labels[Key("shop", "other")] = "metrics=on"
    world.now += metrics.CHOICE_INTERVAL
    assert series(made, NEW) == {"shown": 0, "other": 1000}
    made.close()


def test_series_end_with_the_service(world: World) -> None:
    """Series end at the next scrape, not at the next choice; the other family's series stay."""
    web, web6, gone = service("web", 1), service("web", 1, Family.IPV6), service("gone", 2)
    world.program(web, web6, gone)
    made = world.metrics("5")
    assert series(made, NEW) == {"web": 0, "gone": 0}
    world.remove(gone)
    world.remove(web6)
    assert series(made, NEW) == {"web": 0}
    world.remove(web)
    assert not series(made, NEW)
    made.close()


def test_without_the_option_no_metric_exists(world: World) -> None:
    """Without the option no metric exists, and no counter is read."""
    world.program(service("web", 1))
    reads: list[Any] = []
    for name in ("service_stats", "backend_stats"):
        opened = world.maps[name]
        world.maps[name] = _Recording(opened, reads)  # type: ignore[assignment]
    made = world.metrics("0")
    names = {name for name, _ in values(made)}
    assert not names & {NEW, REFUSED, WITHOUT}
    assert not reads
    made.close()


class _Recording:
    """A map that records its reads."""

    def __init__(self, opened: Map, reads: list[Any]) -> None:
        self._opened, self._reads, self.spec = opened, reads, opened.spec

    def get_many(self, keys: Any) -> Any:
        self._reads.append(keys)
        return self._opened.get_many(keys)
