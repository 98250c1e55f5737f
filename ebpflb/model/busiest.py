# SPDX-License-Identifier: Apache-2.0
"""Which service ports have series of their own in /metrics (docs/metrics.md).

The number is bounded, because each series costs memory in every Prometheus. A series that comes and
goes is of little use, so a service port that has series keeps them until another one is clearly
busier.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ebpflb.model import services
from ebpflb.model.services import Protocol, Requirement

MOST = 1000  # service ports
_KEPT = 0.75  # of a score, from one choice to the next
_AHEAD = 2  # how many times as busy another service port must be to take the place of one


class SeriesOf(NamedTuple):
    """The service ports that have series: the busiest ``limit`` of Services with these labels."""

    limit: int
    selector: tuple[Requirement, ...] = ()


def parse_series(text: str) -> SeriesOf | None:
    """Parse NUMBER or NUMBER,SELECTOR; None for 0. Raises ValueError."""
    number, _, selector = text.partition(",")
    is_number = number.isascii() and number.isdecimal() and len(number) <= len(str(MOST))
    if not (is_number and int(number) <= MOST):
        raise ValueError(f'"{number}" is not a number of service ports from 0 to {MOST}')
    required = services.parse_requirements(selector)
    return SeriesOf(int(number), required) if int(number) else None


def show_series(series: SeriesOf | None) -> str:
    """The inverse of ``parse_series``."""
    if series is None:
        return "0"
    return ",".join([str(series.limit), *(each.text for each in series.selector)])


class Port(NamedTuple):
    """A service port in both families."""

    namespace: str
    service: str
    port: str
    protocol: Protocol


class Busiest:
    """The service ports with the most new connections lately."""

    def __init__(self, limit: int) -> None:
        self.ports: tuple[Port, ...] = ()
        self._limit = limit
        self._totals: Mapping[Port, int] = {}
        self._scores: Mapping[Port, float] = {}

    def choose(self, totals: Mapping[Port, int]) -> None:
        """Set ``ports``; ``totals`` are the connections of all service ports until now.

        A total that has become smaller belongs to a new Service of this name. The first totals
        may be those of months: they make the first choice, and no later one.
        """
        scores = {port: self._score(port, total) for port, total in totals.items()}
        self._scores = scores if self._totals else {}
        self._totals = totals
        ranks = scores | {port: _AHEAD * scores[port] for port in self.ports if port in totals}
        self.ports = tuple(sorted(ranks, key=lambda port: (-ranks[port], port))[: self._limit])

    def _score(self, port: Port, total: int) -> float:
        former = self._totals.get(port, 0)
        more = total - former if total >= former else total
        return _KEPT * self._scores.get(port, 0.0) + more
