# SPDX-License-Identifier: Apache-2.0
"""The agent sets endpoints aside that do not answer, says so, and brings them back."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.agent.endpoint_health import MAP, MOST_OUTCOMES, EndpointWatch
from ebpflb.entries.services import Backend
from ebpflb.kernel.maps.layout import MAPS
from ebpflb.kernel.maps.records import BackendHealth, ServiceBackend, record
from ebpflb.lab.agents import wait_until
from ebpflb.model.annotations import HEALTH_ANNOTATION, HEALTH_PASSIVE
from ebpflb.model.endpoint_health import Outcome, Outcomes
from ebpflb.model.events import Key, Kind
from ebpflb.model.services import PortName
from tests.agent.fakes import WEB, Harness, Json, changed, lists, service, slices, used

IPS = "10.1.0.1", "10.1.0.2", "10.1.0.3"


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """A Service with three endpoints is served."""
    made = Harness(tmp_path)
    made.options = replace(made.options, endpoint_health=HEALTH_PASSIVE)
    made.now = 1000.0
    made.clock = lambda: made.now
    made.start()
    made.send(*lists(service("web", "10.96.0.1"), *IPS))
    yield made
    made.stop()
    assert made.error is None


def annotated(word: str) -> Json:
    return service("web", "10.96.0.1", {HEALTH_ANNOTATION: word})


def outcome(ip: str, *, opened: bool = False, failed: bool = True) -> Outcome:
    return Outcome(WEB, (ip_address(ip), 8080), opened, failed)


def counted(harness: Harness, *outcomes: Outcome) -> None:
    harness.agent.inbox.put(Outcomes(outcomes))
    harness.send()


def test_what_fails_gets_no_connections_for_its_time(harness: Harness) -> None:
    """One Event and the metrics say so, the status names it, and its existing flows stay."""
    health = harness.agent.endpoint_health
    counted(harness, outcome(IPS[0]))
    assert used(harness) == set(IPS[1:])
    assert len(harness.agent.service_sync.planner.actual[WEB].backends) == 3
    [(about, note)] = harness.set_aside
    assert about == Key("default", "web")
    assert note.startswith("endpoint 10.1.0.1:8080 is set aside on this node for 10 s")
    assert harness.status.set_aside == {"default/web/TCP": "10.1.0.1:8080"}
    assert (health.count, health.times) == (1, 1)
    assert health.due == harness.now + 10
    harness.now += 11
    harness.send()
    assert used(harness) == set(IPS)
    assert not harness.status.set_aside
    assert (health.count, health.times) == (0, 1)


def test_a_connection_that_opens_brings_it_back(harness: Harness) -> None:
    counted(harness, outcome(IPS[0]))
    counted(harness, outcome(IPS[0], opened=True, failed=False))
    assert used(harness) == set(IPS)


def test_one_that_the_api_made_ready_again_begins_anew(harness: Harness) -> None:
    counted(harness, outcome(IPS[0]))
    harness.send(changed(Kind.ENDPOINT_SLICE, slices("web", *IPS[1:])))
    harness.send(changed(Kind.ENDPOINT_SLICE, slices("web", *IPS)))
    assert used(harness) == set(IPS)
    assert harness.agent.endpoint_health.due == math.inf


@pytest.mark.parametrize("word", ["Passive", "node", ""])
def test_another_word_is_an_event_and_the_default_counts(harness: Harness, word: str) -> None:
    harness.send(changed(Kind.SERVICE, annotated(word)))
    [warning] = harness.annotations
    assert warning.reason.endswith("is not one of off, passive, so it is passive")
    counted(harness, outcome(IPS[0]))
    assert used(harness) == set(IPS[1:])


def test_it_is_off_by_default_and_a_service_turns_it_on(tmp_path: Path) -> None:
    made = Harness(tmp_path)
    made.start()
    made.send(*lists(service("web", "10.96.0.1"), *IPS))
    counted(made, outcome(IPS[0]))
    assert (used(made), made.endpoint_watch.wanted) == (set(IPS), False)
    made.send(changed(Kind.SERVICE, annotated(HEALTH_PASSIVE)))
    counted(made, outcome(IPS[0]))
    assert (used(made), made.endpoint_watch.wanted) == (set(IPS[1:]), True)
    made.stop()


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


class Watched(EndpointWatch):
    """Without a program."""

    def _attach(self) -> None:
        self._link = -1

    def _watch_packets(self, *, watched: bool) -> None:
        pass

    def _detach(self) -> None:
        self._link = None


Counts = dict[ServiceBackend, BackendHealth]
FAILED, OPENED = BackendHealth(1, 7, 8, 9), BackendHealth(1, 7, 0, 0, has_opened=1)


@pytest.fixture
def watched() -> Iterator[Callable[[Counts], tuple[Watched, list[Outcomes]]]]:
    """A function that returns a watch of given counts, and the list of its messages."""
    made: list[Watched] = []

    def make(counts: Counts) -> tuple[Watched, list[Outcomes]]:
        backends = {n: Backend(ip_address("10.1.0.1"), n, frozenset(), n, 5) for n in range(1, 200)}
        maps: Mapping[str, Any] = {
            MAP: FakeMap(counts),
            "backend_slots": FakeMap({n: n for n in backends}),
            "slots": FakeMap(backends),
            "service_names": FakeMap({5: PortName("default", "web", "", 6, 4)}),  # type: ignore[arg-type]
        }
        read: list[Outcomes] = []
        made.append(Watched(maps, Path("/"), Path("/"), read.append))
        made[-1].start()
        return made[-1], read

    yield make
    for each in made:
        each.stop()


def test_counts_are_read_while_it_is_wanted(watched: Any) -> None:
    """Failures leave an entry, by which a success is noted; what opened leaves none. What happened
    at the backend of another service that had the id before is nobody's.
    """
    one, two, three, former = (ServiceBackend(s, n) for s, n in ((5, 1), (5, 2), (5, 3), (6, 4)))
    counts = {one: FAILED, two: OPENED, three: BackendHealth(1, 7), former: OPENED}
    watch, read = watched(counts)
    watch.set(wanted=True)
    wait_until("they are read", lambda: bool(read))
    assert {(it.port, it.place[1], it.has_opened, it.has_failed) for it in read[0].outcomes} == {
        (WEB, 1, False, True),
        (WEB, 2, True, False),
    }
    assert counts == {one: BackendHealth(), three: BackendHealth(1, 7)}
    watch.set(wanted=False)
    wait_until("nothing is due", lambda: watch.due == math.inf)


def test_a_flood_is_read_in_parts(watched: Any) -> None:
    ids = range(1, 2 * MOST_OUTCOMES + 1)
    counts = dict.fromkeys((ServiceBackend(5, id) for id in ids), FAILED)
    watch, read = watched(counts)
    watch.set(wanted=True)
    wait_until("both parts are read", lambda: len(read) == 2)
    assert [len(each.outcomes) for each in read] == [MOST_OUTCOMES] * 2
