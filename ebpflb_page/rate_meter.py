# SPDX-License-Identifier: Apache-2.0
"""Rates of services and their endpoints, as `ebpflb top` has them, and of each service a minute.

Counters are read when somebody asks, at most once in two seconds whatever the number of clients,
and never for more than a tenth of the time.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import msgspec

from ebpflb.errors import NodeError
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.plan.entries import service_of
from ebpflb.tools import rates
from ebpflb.tools.rates import Rate, Sample

LINE_SECONDS = 60.0
_SECONDS, _IDLE = 2.0, 20.0  # between two readings; after that long, a new beginning
_SHARE = 10  # of the time at most one part is spent on reading

Opened = Callable[[], AbstractContextManager[Mapping[str, Map]]]


class LinePoint(msgspec.Struct):
    """``age`` is in seconds; connections and flows each second."""

    age: float
    new: float


class ServiceRates(msgspec.Struct):
    """``line``: the last minute, the oldest first; it is empty until two readings were made."""

    new: float = 0.0
    refused: float = 0.0
    line: list[LinePoint] = []
    ports: list[Rate] = []  # its service ports, each followed by its endpoints


class Measured(msgspec.Struct):
    """``seconds``: in which the newest rates were measured; 0: not yet. By NAMESPACE/NAME."""

    seconds: float
    services: dict[str, ServiceRates]


class _Reading(NamedTuple):
    """Of all services at a time: the rates that are not zero."""

    at: float
    new: dict[str, float]


class RateMeter:
    """Safe in several threads: one reads, and all get what was read."""

    def __init__(self, opened: Opened, clock: Callable[[], float] = time.monotonic) -> None:
        self._opened, self._clock = opened, clock
        self._lock = threading.Lock()
        self._last: Sample | None = None
        self._readings: deque[_Reading] = deque(maxlen=int(LINE_SECONDS / _SECONDS) + 1)
        self._rows: dict[str, list[Rate]] = {}  # of the newest reading
        self._seconds = 0.0
        self._next = 0.0

    def of(self, services: Iterable[str]) -> Measured:
        """Of these, as NAMESPACE/NAME; nothing where there are no maps. Raises KernelError."""
        with self._lock:
            if self._clock() >= self._next:
                try:
                    self._read()
                except NodeError:
                    self._readings.clear()
                    self._last, self._seconds = None, 0.0
            return Measured(self._seconds, {name: self._one(name) for name in services})

    def _read(self) -> None:
        began = self._clock()
        with self._opened() as maps:
            sample = rates.sample(maps)
            if self._last is None or sample.at - self._last.at > _IDLE:
                self._readings.clear()
                self._seconds = 0.0
            else:
                self._seconds = sample.at - self._last.at
                self._add(rates.rates(maps, self._last, sample))
        self._last = sample
        took = self._clock() - began
        self._next = began + max(_SECONDS, took * _SHARE)

    def _add(self, rows: list[Rate]) -> None:
        new: dict[str, float] = {}
        self._rows = {}
        for row in rows:
            name = service_of(row.service)
            self._rows.setdefault(name, []).append(row)
            if not row.backend and row.new:
                new[name] = new.get(name, 0.0) + row.new
        self._readings.append(_Reading(self._clock(), new))

    def _one(self, service: str) -> ServiceRates:
        if not self._readings:
            return ServiceRates()
        now = self._clock()
        line = [
            LinePoint(round(now - it.at, 1), round(it.new.get(service, 0.0), 1))
            for it in self._readings
            if now - it.at <= LINE_SECONDS
        ]
        rows = self._rows.get(service, [])
        refused = sum(row.refused for row in rows if not row.backend)
        new = self._readings[-1].new.get(service, 0.0)
        return ServiceRates(round(new, 1), round(refused, 1), line, rows)
