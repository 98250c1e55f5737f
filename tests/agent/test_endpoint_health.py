# SPDX-License-Identifier: Apache-2.0
"""The agent sets endpoints aside that do not answer, reports this, and brings them back."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.agent.endpoint_health import MAP, MOST_OUTCOMES, EndpointWatch
from ebpflb.entries.services import Backend
from ebpflb.kernel.maps.layout import MAPS
from ebpflb.kernel.maps.records import BackendHealth, ServiceBackend, record
from ebpflb.model.annotations import HEALTH_ANNOTATION, HEALTH_PASSIVE
from ebpflb.model.endpoint_health import Outcome
from ebpflb.model.events import Key, Kind
from ebpflb.model.services import PortName
from tests.agent.fakes import WEB, Harness, Json, changed, lists, service, slices, used

IPS = "10.1.0.1", "10.1.0.2", "10.1.0.3"


class Watched(EndpointWatch):
    """A part of the agent without a program; ``counted`` is what the next turn reads, unless it is
    None.
    """

    counted: tuple[Outcome, ...] | None = None

    def _attach(self) -> None:
        self._link = 1

    def _watch_packets(self, *, watched: bool) -> None:
        pass

    def _detach(self) -> None:
        self._link = None

    @property
    def is_attached(self) -> bool:
        return self._link is not None

    def _read(self) -> list[Outcome]:
        if self.counted is None:
            return super()._read()
        read, self.counted = list(self.counted), ()
        return read


class Watching:
    """An agent that serves a Service with three endpoints, and its watch, whose turns the test
    takes.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.agent, self.now = Harness(folder), 1000.0
        self.agent.options = replace(self.agent.options, **options)
        self.agent.start()
        self.agent.send(*lists(service("web", "10.96.0.1"), *IPS))
        self.events: list[tuple[Key, str]] = []
        self.watch = Watched(
            {},
            self.agent.options,
            self.agent.cluster,
            self.agent.inbox,
            self._record,
            clock=lambda: self.now,
        )

    def _record(self, service: Key, note: str) -> None:
        self.events.append((service, note))

    def turn(self, *counted: Outcome) -> set[str]:
        """Take a turn that reads these counts, if any; return which endpoints are used then."""
        self.watch.counted = counted
        self.watch.turn()
        self.agent.send()
        return used(self.agent)


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    made = Watching(tmp_path, endpoint_health=HEALTH_PASSIVE)
    yield made
    made.agent.stop()
    assert made.agent.error is None


def annotated(word: str) -> Json:
    return service("web", "10.96.0.1", {HEALTH_ANNOTATION: word})


def outcome(ip: str, *, opened: bool = False, failed: bool = True) -> Outcome:
    return Outcome(WEB, (ip_address(ip), 8080), opened, failed)


def test_what_fails_gets_no_connections_for_its_time(watching: Watching) -> None:
    """An Event, the metrics and the status name the failed endpoint; its existing flows stay."""
    watch, harness = watching.watch, watching.agent
    assert watching.turn(outcome(IPS[0])) == set(IPS[1:])
    assert len(harness.service_sync.planner.actual[WEB].backends) == 3
    [(about, note)] = watching.events
    assert about == Key("default", "web")
    assert note.startswith("endpoint 10.1.0.1:8080 is set aside on this node for 10 s")
    assert harness.status.set_aside == {"default/web/TCP": "10.1.0.1:8080"}
    assert (watch.count, watch.times) == (1, 1)
    watching.now += 9
    assert watching.turn() == set(IPS[1:])
    watching.now += 1
    assert watching.turn() == set(IPS)
    assert not harness.status.set_aside
    assert (watch.count, watch.times) == (0, 1)


def test_a_connection_that_opens_brings_it_back(watching: Watching) -> None:
    watching.turn(outcome(IPS[0]))
    assert watching.turn(outcome(IPS[0], opened=True, failed=False)) == set(IPS)


def test_one_that_the_api_made_ready_again_begins_anew(watching: Watching) -> None:
    watching.turn(outcome(IPS[0]))
    for ips in (IPS[1:], IPS):
        watching.agent.send(changed(Kind.ENDPOINT_SLICE, slices("web", *ips)))
        assert watching.turn() == set(ips)


def test_it_is_off_by_default_and_a_service_turns_it_on(tmp_path: Path) -> None:
    made = Watching(tmp_path)
    made.agent.cluster.watches = (made.watch,)
    assert made.turn(outcome(IPS[0])) == set(IPS)
    assert not made.watch.wanted.is_set()  # the thread sleeps
    assert not made.watch.is_attached
    made.agent.send(changed(Kind.SERVICE, annotated(HEALTH_PASSIVE)))
    assert made.watch.wanted.is_set()
    assert made.turn(outcome(IPS[0])) == set(IPS[1:])
    made.agent.stop()


class FakeMap:
    """Entries of a hash or an array."""

    spec = MAPS["slots"]

    def __init__(self, entries: dict[Any, Any]) -> None:
        self.entries = entries

    def slices(self) -> Iterator[tuple[bytes, bytes]]:
        key, value = record("struct service_backend"), record("struct backend_health")
        yield (
            b"".join(map(key.pack, self.entries)),
            b"".join(map(value.pack, self.entries.values())),
        )

    def items(self) -> Any:
        return self.entries.items()

    def get(self, key: Any) -> Any:
        return self.entries.get(key)

    def replace(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def delete(self, keys: list[Any]) -> None:
        for key in keys:
            del self.entries[key]


Counts = dict[ServiceBackend, BackendHealth]
FAILED, OPENED = BackendHealth(1, 7, 8, 9), BackendHealth(1, 7, 0, 0, has_opened=1)


def reading(counts: Counts) -> Watched:
    """Return a watch that reads these counts."""
    backends = {n: Backend(ip_address("10.1.0.1"), n, frozenset(), n, 5) for n in range(1, 200)}
    maps: Mapping[str, Any] = {
        MAP: FakeMap(counts),
        "backend_slots": FakeMap({n: n for n in backends}),
        "slots": FakeMap(backends),
        "service_names": FakeMap({5: PortName("default", "web", "", 6, 4)}),  # type: ignore[arg-type]
    }
    unused: Any = None
    return Watched(maps, *[unused] * 4)


def test_what_is_counted_is_read_once() -> None:
    """A failure leaves an entry, from which a success is inferred; a success leaves none. Counts of
    an earlier service with the same backend id are ignored.
    """
    one, two, three, former = (ServiceBackend(s, n) for s, n in ((5, 1), (5, 2), (5, 3), (6, 4)))
    counts = {one: FAILED, two: OPENED, three: BackendHealth(1, 7), former: OPENED}
    read = reading(counts)._read()  # noqa: SLF001
    assert {(it.port, it.place[1], it.has_opened, it.has_failed) for it in read} == {
        (WEB, 1, False, True),
        (WEB, 2, True, False),
    }
    assert counts == {one: BackendHealth(), three: BackendHealth(1, 7)}


def test_a_flood_is_read_in_parts() -> None:
    ids = range(1, 2 * MOST_OUTCOMES + 1)
    watch = reading(dict.fromkeys((ServiceBackend(5, id) for id in ids), FAILED))
    assert [len(watch._read()) for _ in range(3)] == [MOST_OUTCOMES, MOST_OUTCOMES, 0]  # noqa: SLF001
