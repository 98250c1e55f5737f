# SPDX-License-Identifier: Apache-2.0
"""Rates of the node, of Services and of their endpoints, in the last minutes.

Counters are read when a client asks, and every STEP for the node's graphs, which cover an hour.
Reading takes at most a tenth of the time (``Paced``).
"""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ebpflb.entries.services import service_of
from ebpflb.errors import NodeError
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb_page import rates
from ebpflb_page.rates import DROPPED, Rate, Sample

# A value that is read at intervals and shared by all clients.


SECONDS = 2.0  # at least, from one reading to the next
QUICK_SECONDS = 0.2  # clients wait for a reading that takes no longer
STALE_SECONDS = 30.0  # clients wait for a reading if the last one is older

_Value = TypeVar("_Value")


class Paced(Generic[_Value]):
    """A value that is read when a client asks, at most every SECONDS.

    Reading takes at most one ``part``-th of the time. Any thread may call it, but only one reads at
    a time. If reading takes long, it moves to a separate thread, and clients get the last value
    until it is done.
    """

    def __init__(
        self, read: Callable[[], _Value], part: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._part, self._clock = read, part, clock
        self._lock = threading.Lock()
        self._value: _Value | None = None
        self._next = self._at = self._took = 0.0
        self._is_reading = False

    def get(self) -> _Value:
        """Return the value. Raises the exception of a reading; the next call then reads again."""
        with self._lock:
            late = self._clock() - self._next
            if self._value is not None and (late < 0 or self._is_reading):
                return self._value
            if self._value is None or late > STALE_SECONDS or self._took <= QUICK_SECONDS:
                at = self._clock()
                return self._keep(self._read(), at)
            self._is_reading = True
            threading.Thread(target=self._read_alone, name="paced", daemon=True).start()
            return self._value

    @property
    def age(self) -> float:
        """Return the seconds since the reading of the value began."""
        return self._clock() - self._at

    def _keep(self, value: _Value, at: float) -> _Value:
        self._value, self._at = value, at
        self._took = self._clock() - at
        self._next = at + max(SECONDS, self._took * self._part)
        return value

    def _read_alone(self) -> None:
        """Read in a separate thread. After an error the next client reads, and may get it."""
        at = self._clock()
        try:
            value = self._read()
        except Exception:
            value = None
        with self._lock:
            self._is_reading = False
            if value is None:
                self._value = None
            else:
                self._keep(value, at)


KEPT_SECONDS, MINUTE = 300.0, 60.0
HOUR, STEP = 3600.0, 10.0  # seconds for which a point of the whole node is kept, and between two
MOST_LINES = 11  # endpoints in a graph; the slower ones are one line together, the twelfth colour
OTHERS, REFUSED = "all others", "refused"
_IDLE = 20.0  # seconds without a reading after which the lines begin again
_PART = 10

Opened = Callable[[], AbstractContextManager[Mapping[str, Map]]]


class NodeRates(msgspec.Struct):
    """Rates per second of the whole node, the oldest first. ``ages`` are in seconds."""

    ages: list[float] = []
    new: list[float] = []
    refused: list[float] = []
    dropped: list[float] = []


class EndpointRate(msgspec.Struct):
    """The rates of an endpoint. ``new``: connections a second, on average in the last minute.

    ``share``: the chance that the endpoint gets a new connection, or None if it gets none.
    """

    port: str
    endpoint: str
    pod: str
    new: float
    share: float | None


class ServiceRates(msgspec.Struct):
    """The rates of a Service. ``line``: new connections a second in the last minute, at
    ``Measured.ages``.
    """

    new: float = 0.0
    refused: float = 0.0
    line: list[float] = []
    endpoints: list[EndpointRate] = []  # in the order of their ports and addresses


class Measured(msgspec.Struct):
    """The rates of Services by NAMESPACE/NAME; ``ages`` is empty until there are two readings."""

    ages: list[float]
    services: dict[str, ServiceRates]


class Line(msgspec.Struct):
    name: str
    values: list[float]


class Graph(msgspec.Struct):
    """New connections per second by endpoint, and refused connections if there were any.

    ``ages`` are in seconds, the oldest first.
    """

    ages: list[float] = []
    lines: list[Line] = []


class _Point(NamedTuple):
    """New, refused and dropped connections a second of the whole node, at one time."""

    at: float
    node: tuple[float, float, float]


class _Reading(NamedTuple):
    """All nonzero rates at one time. An endpoint is identified by its service port and
    ADDRESS:PORT.
    """

    at: float
    node: tuple[float, float, float]
    new: dict[str, float]
    refused: dict[str, float]
    endpoints: dict[str, dict[tuple[str, str], float]]


class RateMeter:
    """Measures rates; without maps it has none. Any thread may call it."""

    def __init__(self, opened: Opened, clock: Callable[[], float] = time.monotonic) -> None:
        self._opened, self._clock = opened, clock
        self._last: Sample | None = None
        self._took = 0.0  # seconds for the last reading
        self._rows: dict[str, list[Rate]] = {}  # of the newest reading
        self._readings: deque[_Reading] = deque(maxlen=int(KEPT_SECONDS / SECONDS) + 1)
        self._hour: deque[_Point] = deque(maxlen=int(HOUR / STEP))
        self._paced = Paced(self._read, _PART, clock)

    def node(self) -> NodeRates:
        """Return the rates of the last hour, and each reading of the last minutes.

        All methods raise KernelError.
        """
        readings = self._paced.get()
        if not readings:
            return NodeRates()
        oldest, begin = readings[0].at, self._clock() - HOUR
        points = [it for it in self._hour if begin <= it.at < oldest]
        points += [_Point(it.at, it.node) for it in readings]
        columns = zip(*(it.node for it in points), strict=True)
        return NodeRates(self._ages(points), *map(list, columns))

    def of(self, services: Iterable[str]) -> Measured:
        """Return the rates of these Services (NAMESPACE/NAME) in the last minute."""
        minute = self._minute()
        return Measured(self._ages(minute), {name: self._one(name, minute) for name in services})

    def latest(self) -> Mapping[str, tuple[float, float]]:
        """Return new and refused connections a second, of the Services that have any."""
        readings = self._paced.get()
        if not readings:
            return {}
        new, refused = readings[-1].new, readings[-1].refused
        return {name: (new.get(name, 0), refused.get(name, 0)) for name in {*new, *refused}}

    def graph(self, service: str) -> Graph:
        """Return the lines of the fastest MOST_LINES endpoints, sorted by address."""
        readings = self._paced.get()
        points = [it.endpoints.get(service, {}) for it in readings]
        total: Counter[tuple[str, str]] = Counter()
        for point in points:
            total.update(point)
        drawn = {key for key, _ in total.most_common(MOST_LINES)}
        rows = [row for row in self._endpoints(service) if _key(row) in drawn]
        lines = [Line(_name(row), [it.get(_key(row), 0.0) for it in points]) for row in rows]
        if len(total) > len(drawn):
            rest = [round(sum(it[key] for key in it if key not in drawn), 1) for it in points]
            lines.append(Line(OTHERS, rest))
        refused = [it.refused.get(service, 0.0) for it in readings]
        if any(refused):
            lines.append(Line(REFUSED, refused))
        return Graph(self._ages(readings), lines)

    def _minute(self) -> list[_Reading]:
        now = self._clock()
        return [it for it in self._paced.get() if now - it.at <= MINUTE]

    def _ages(self, readings: Iterable["_Reading | _Point"]) -> list[float]:
        now = self._clock()
        return [round(now - it.at, 1) for it in readings]

    def _one(self, service: str, minute: list[_Reading]) -> ServiceRates:
        if not minute:
            return ServiceRates()
        sums: Counter[tuple[str, str]] = Counter()
        for reading in minute:
            sums.update(reading.endpoints.get(service, {}))
        rows = [(row, sums[_key(row)] / len(minute)) for row in self._endpoints(service)]
        return ServiceRates(
            minute[-1].new.get(service, 0.0),
            minute[-1].refused.get(service, 0.0),
            [it.new.get(service, 0.0) for it in minute],
            [
                EndpointRate(row.service, row.backend, row.pod, round(new, 2), row.share)
                for row, new in rows
            ],
        )

    def _endpoints(self, service: str) -> list[Rate]:
        return sorted((row for row in self._rows.get(service, ()) if row.backend), key=_key)

    def _read(self) -> list[_Reading]:
        begun = self._clock()
        try:
            with self._opened() as maps:
                self._measure(maps)
        except NodeError:
            self._begin_again()
        self._took = self._clock() - begun
        return [*self._readings]

    def _measure(self, maps: Mapping[str, Map]) -> None:
        sample, before = rates.sample(maps), self._last
        if before is None or sample.at - before.at > max(_IDLE, 2 * _PART * self._took):
            self._begin_again()
        else:
            self._add(rates.rates(maps, before, sample), _of_node(before, sample))
        self._last = sample

    def _begin_again(self) -> None:
        self._readings.clear()
        self._last = None

    def _add(self, rows: list[Rate], verdicts: tuple[float, float]) -> None:
        by_service: dict[str, list[Rate]] = {}
        new, refused = defaultdict[str, float](float), defaultdict[str, float](float)
        endpoints: dict[str, dict[tuple[str, str], float]] = {}
        for row in rows:
            name = service_of(row.service)
            by_service.setdefault(name, []).append(row)
            if not row.backend:
                new[name] += row.new
                refused[name] += row.refused
            elif row.new:
                endpoints.setdefault(name, {})[_key(row)] = row.new
        self._rows = by_service
        node = (round(sum(new.values()), 1), *verdicts)
        now = self._clock()
        self._readings.append(_Reading(now, node, _rounded(new), _rounded(refused), endpoints))
        if not self._hour or now - self._hour[-1].at >= STEP:
            self._hour.append(_Point(now, node))


def _of_node(before: Sample, after: Sample) -> tuple[float, float]:
    """Return refused and dropped requests a second."""
    seconds = max(after.at - before.at, 1e-3)
    grown = {
        name: max(0, count - before.verdicts.get(name, 0)) for name, count in after.verdicts.items()
    }
    dropped = sum(grown.get(name, 0) for name in DROPPED)
    return round(grown.get("refused", 0) / seconds, 1), round(dropped / seconds, 1)


def _rounded(counts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(count, 1) for name, count in counts.items() if count}


def _key(row: Rate) -> tuple[str, str]:
    return row.service, row.backend


def _name(row: Rate) -> str:
    return f"{row.pod or row.backend} ({row.service.rpartition(':')[2]})"
