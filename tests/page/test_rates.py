# SPDX-License-Identifier: Apache-2.0
"""Rates of the last minutes, from counters that are read no more often than necessary."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebpflb.errors import NodeError
from ebpflb_page import rates
from ebpflb_page.rates import DROPPED, Rate, Sample

OUTCOMES = Path(__file__).parents[2] / "bpf/core/outcome.h"
TCP, UDP = "default/web:tcp/TCP", "default/web:udp/UDP"


class Counters:
    """A node whose only Service has this many new connections a second."""

    def __init__(self) -> None:
        self.now, self.read, self.takes, self.new, self.gone = 100.0, 0, 0.0, 5.0, False
        self.verdicts = {"refused": 0, "source_denied": 0, "flows_full": 0, "translated": 0}
        self.endpoints = [("10.0.0.2:80", "web-2", 3.0, 0.75), ("10.0.0.1:80", "web-1", 1.0, 0.25)]

    @contextmanager
    def opened(self) -> Iterator[Any]:
        if self.gone:
            raise NodeError("no maps")
        yield {}

    def sample(self, maps: Any) -> Sample:
        self.read += 1
        self.now += self.takes
        return Sample(self.now, {}, {}, dict(self.verdicts))

    def rates(self, maps: Any, before: Sample, after: Sample) -> list[Rate]:
        backends = [
            Rate(TCP, where, pod, new, 0.0, 1, of) for where, pod, new, of in self.endpoints
        ]
        return [Rate(TCP, "", "", self.new, 1.0, 1), *backends, Rate(UDP, "", "", 2.0, 0.0, 0)]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Counters:
    made = Counters()
    monkeypatch.setattr(rates, "sample", made.sample)
    monkeypatch.setattr(rates, "rates", made.rates)
    return made


def meter(node: Counters) -> Any:
    from ebpflb_page.rate_meter import RateMeter

    return RateMeter(node.opened, lambda: node.now)


def measured(node: Counters, made: Any, readings: int = 3) -> Any:
    """Return the Service after this many readings, two seconds apart."""
    for _ in range(readings):
        node.now += 2
        found = made.of(["default/web"])
    return found.services["default/web"]


def test_a_minute(node: Counters) -> None:
    """The line has a point every two seconds, over all ports; the first one comes after the second
    reading.
    """
    made = meter(node)
    assert made.of(["default/web"]).ages == []
    for _ in range(40):
        node.now += 2
        found = made.of(["default/web", "default/none"])
    web, none = found.services["default/web"], found.services["default/none"]
    assert (web.new, web.refused, web.line) == (7.0, 1.0, [7.0] * 31)
    assert (found.ages[0], found.ages[-1], len(found.ages)) == (60, 0, 31)
    assert set(none.line) == {0.0} and none.endpoints == []
    assert made.latest() == {"default/web": (7.0, 1.0)}


def test_endpoints_are_averages_of_a_minute_in_a_fixed_order(node: Counters) -> None:
    """Endpoints' rates are averages of a minute, because one reading has too few connections to
    show the shares.
    """
    made = meter(node)
    measured(node, made, 2)
    node.endpoints = [("10.0.0.1:80", "web-1", 3.0, 0.25), ("10.0.0.2:80", "web-2", 1.0, 0.75)]
    web = measured(node, made, 1)
    assert [(it.endpoint, it.new, it.share) for it in web.endpoints] == [
        ("10.0.0.1:80", 2.0, 0.25),
        ("10.0.0.2:80", 2.0, 0.75),
    ]


def test_a_graph_has_a_line_for_each_endpoint(node: Counters) -> None:
    """The lines are ordered by address; the busiest endpoints have a line each, all others share
    one, and refusals have one.
    """
    from ebpflb_page.rate_meter import MOST_LINES, OTHERS, REFUSED

    node.endpoints = [(f"10.0.0.{10 + i}:80", f"web-{i}", float(i + 1), 0.05) for i in range(20)]
    made = meter(node)
    measured(node, made)
    graph = made.graph("default/web")
    assert [it.name for it in graph.lines] == [
        *(f"web-{i} (tcp/TCP)" for i in range(9, 20)),
        OTHERS,
        REFUSED,
    ]
    assert len(graph.lines) == MOST_LINES + 2
    assert [graph.lines[at].values for at in (0, -2, -1)] == [[10.0] * 2, [45.0] * 2, [1.0] * 2]
    assert len(graph.ages) == 2
    assert made.graph("default/none").lines == []


def test_the_node_has_all_that_is_new_refused_and_dropped(node: Counters) -> None:
    """The node's rates are per second; refused and dropped connections include packets'
    verdicts.
    """
    made = meter(node)
    measured(node, made, 2)
    node.verdicts |= {"refused": 8, "source_denied": 2, "flows_full": 4, "translated": 99}
    measured(node, made, 1)
    found = made.node()
    assert (found.new, found.refused, found.dropped) == ([7.0] * 2, [0, 4.0], [0, 3.0])
    assert found.ages == [2, 0]


def test_the_lines_of_the_node_begin_an_hour_ago(node: Counters) -> None:
    """Each reading of the last minutes has a point; earlier times have a point every STEP."""
    from ebpflb_page.rate_meter import HOUR, KEPT_SECONDS, SECONDS, STEP

    made = meter(node)
    made.node()
    for _ in range(int(2 * HOUR / STEP)):
        node.now += STEP
        made.node()
    for _ in range(int(KEPT_SECONDS / SECONDS) + 1):
        node.now += SECONDS
        found = made.node()
    assert HOUR - STEP <= found.ages[0] <= HOUR
    assert found.ages == sorted(found.ages, reverse=True)
    steps, readings = (HOUR - KEPT_SECONDS) / STEP, KEPT_SECONDS / SECONDS
    assert abs(len(found.ages) - steps - readings) <= 2
    assert len(found.new) == len(found.ages)


def test_dropped_verdicts_are_those_of_the_datapath() -> None:
    """The dropped verdicts are those that bpf/core/outcome.h drops."""
    cases = OUTCOMES.read_text().partition("REJECT;\n")[2].partition("return DROP;")[0]
    assert {it.lower() for it in re.findall(r"VERDICT_(\w+):", cases)} == DROPPED


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


def test_after_a_while_without_clients_it_begins_again(node: Counters) -> None:
    """After a pause the measurement begins again, because a rate over hours would mean nothing."""
    made = meter(node)
    measured(node, made)
    node.now += 3600
    found = made.of(["default/web"])
    assert (found.ages, found.services["default/web"].line) == ([], [])
