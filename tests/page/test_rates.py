# SPDX-License-Identifier: Apache-2.0
"""Rates of the last minute: of what the counters say, read no more often than it is worth."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ebpflb.errors import NodeError
from ebpflb.tools import rates
from ebpflb.tools.rates import Rate, Sample


class Counters:
    """A node whose one Service has so many new connections a second."""

    def __init__(self) -> None:
        self.now, self.read, self.takes, self.new, self.gone = 100.0, 0, 0.0, 5.0, False

    @contextmanager
    def opened(self) -> Iterator[Any]:
        if self.gone:
            raise NodeError("no maps")
        yield {}

    def sample(self, maps: Any) -> Sample:
        self.read += 1
        self.now += self.takes
        return Sample(self.now, {}, {})

    def rates(self, maps: Any, before: Sample, after: Sample) -> list[Rate]:
        tcp = Rate("default/web:tcp/TCP", "", "", self.new, 1.0, 1)
        udp = Rate("default/web:udp/UDP", "", "", 0.0, 0.0, 0)
        backend = Rate("default/web:tcp/TCP", "10.0.0.1:80", "web-1", self.new, 0.0, 1)
        return [tcp, backend, udp]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Counters:
    made = Counters()
    monkeypatch.setattr(rates, "sample", made.sample)
    monkeypatch.setattr(rates, "rates", made.rates)
    return made


def meter(node: Counters) -> Any:
    from ebpflb_page.rate_meter import RateMeter

    return RateMeter(node.opened, lambda: node.now)


def test_a_minute(node: Counters) -> None:
    """A point every two seconds, of all ports of the Service; the first is known at the second."""
    made = meter(node)
    assert made.of(["default/web"]).seconds == 0
    for _ in range(40):
        node.now += 2
        found = made.of(["default/web", "default/none"])
    web, none = found.services["default/web"], found.services["default/none"]
    assert (found.seconds, web.new, web.refused, len(web.ports)) == (2, 5.0, 1.0, 3)
    assert [it.new for it in web.line] == [5.0] * 31
    assert (web.line[0].age, web.line[-1].age) == (60, 0)
    assert {it.new for it in none.line} == {0.0} and none.ports == []


def test_many_clients_cost_no_more_than_one(node: Counters) -> None:
    """All get what was read for the first of them."""
    made = meter(node)
    for _ in range(50):
        made.of(["default/web"])
    assert node.read == 1


def test_reading_takes_a_tenth_of_the_time_at_most(node: Counters) -> None:
    made = meter(node)
    node.takes = 3.0
    made.of([])
    for _ in range(26):
        node.now += 1
        made.of([])
    assert node.read == 1
    node.now += 1
    made.of([])
    assert node.read == 2


def test_after_a_while_without_clients_it_begins_anew(node: Counters) -> None:
    """A rate over hours is none."""
    made = meter(node)
    made.of([])
    node.now += 2
    assert made.of([]).seconds == 2
    node.now += 3600
    found = made.of(["default/web"])
    assert (found.seconds, found.services["default/web"].line) == (0, [])


def test_without_maps_nothing_is_measured(node: Counters) -> None:
    """The agent may answer all the same, and the list is shown."""
    made = meter(node)
    node.gone = True
    assert made.of(["default/web"]).services["default/web"].line == []
