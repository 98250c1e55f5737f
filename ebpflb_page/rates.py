# SPDX-License-Identifier: Apache-2.0
"""The rates of services and backends, from the counters in the pinned maps."""

import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ebpflb.entries.services import Backend
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.kernel.maps.records import BackendCounters, ServiceCounters
from ebpflb.model.addresses import host_port
from ebpflb.tools.snapshot import Snapshot

# Verdicts for which a packet or a call gets no answer (action_of in bpf/core/outcome.h).
DROPPED = frozenset(
    {
        "no_local_endpoint",
        "recycled",
        "ports_exhausted",
        "flows_full",
        "source_denied",
        "unallocated",
        "unknown_port",
        "redirect",
        "reject_limited",
    }
)

_NO_SERVICE, _NO_BACKEND = ServiceCounters(0, 0, 0, 0), BackendCounters(0, 0)


class Rate(msgspec.Struct):
    """The rates of a service port, or of one of its backends (``backend`` is not "").

    Rates are connections a second; rates of service ports include the flows of packets.
    ``refused``, of services only: connections for which there was no endpoint, or none on this node
    under policy Local. ``open``: the sockets that are connected now. ``share``: the chance that a
    backend gets a new connection under policy Cluster (Local if only that list has backends), or
    None if it gets none.
    """

    service: str
    backend: str
    pod: str
    new: float
    refused: float
    open: int
    share: float | None = None


class Sample(NamedTuple):
    """Counters, with the time of the monotonic clock when they were read."""

    at: float
    services: dict[int, ServiceCounters]
    backends: dict[int, BackendCounters]
    verdicts: Mapping[str, int] = MappingProxyType({})


def sample(maps: Mapping[str, Map]) -> Sample:
    """Read the counters. Raises KernelError."""
    services = [number for number, _ in maps["service_names"].items()]
    backends = [number for number, _ in maps["backend_names"].items()]
    of_services = maps["service_stats"].get_many(services)
    of_backends = maps["backend_stats"].get_many(backends)
    return Sample(
        time.monotonic(),
        {number: ServiceCounters(*counts) for number, counts in of_services.items()},
        {number: BackendCounters(*counts) for number, counts in of_backends.items()},
        {name: maps["verdicts"].get(number)[0] for number, name in VERDICTS.items()},
    )


def rates(maps: Mapping[str, Map], before: Sample, after: Sample) -> list[Rate]:
    """Return a row for each service port, the fastest first, each followed by the rows of its
    backends.

    A service port has an id in each family, and one row for both. An id that was given to another
    service between the samples counts from zero.
    """
    seconds = max(after.at - before.at, 1e-3)
    snapshot = Snapshot(maps)
    of_service = _backends(snapshot, before, after, seconds)
    found: dict[str, tuple[Rate, list[Rate]]] = {}
    for number, now in after.services.items():
        name = snapshot.service(number)
        service, backends = found.setdefault(name, (Rate(name, "", "", 0.0, 0.0, 0), []))
        _add(service, before.services.get(number, _NO_SERVICE), now, seconds)
        backends += of_service.get(number, [])
    return _sorted(found.values())


def _backends(
    snapshot: Snapshot, before: Sample, after: Sample, seconds: float
) -> dict[int, list[Rate]]:
    """Return the rows of backends, by the id of their service."""
    found: dict[int, list[Rate]] = {}
    backends = snapshot.backends
    shares = _shares(backends.values())
    for number, backend in backends.items():
        now = after.backends.get(number, _NO_BACKEND)
        new = _per_second(before.backends.get(number, _NO_BACKEND).opened, now.opened, seconds)
        name = snapshot.backend_names.get(number)
        where = host_port(backend.address, backend.port)
        pod, is_open = name.target if name else "", max(0, now.opened - now.closed)
        row = Rate("", where, pod, new, 0.0, is_open, shares.get(number))
        found.setdefault(backend.service, []).append(row)
    return found


def _shares(backends: Iterable[Backend]) -> dict[int, float]:
    """Return the chances by the ids of the backends that get new connections."""
    lists: dict[tuple[int, str], list[Backend]] = {}
    for backend in backends:
        for name in backend.flags & {"cluster", "local"}:
            lists.setdefault((backend.service, name), []).append(backend)
    found: dict[int, float] = {}
    for (service, name), members in lists.items():
        if name == "local" and (service, "cluster") in lists:
            continue
        total = sum(backend.weight for backend in members)
        found |= {backend.id: backend.weight / total for backend in members if total}
    return found


def _add(service: Rate, before: ServiceCounters, now: ServiceCounters, seconds: float) -> None:
    """Add the rates of one family to the row of the service port."""
    refused = _per_second(
        before.refused + before.no_local_endpoint, now.refused + now.no_local_endpoint, seconds
    )
    service.new = round(service.new + _per_second(before.chosen, now.chosen, seconds), 1)
    service.refused = round(service.refused + refused, 1)


def _per_second(before: int, now: int, seconds: float) -> float:
    return round((now - before if now >= before else now) / seconds, 1)


def _sorted(found: Iterable[tuple[Rate, list[Rate]]]) -> list[Rate]:
    rows: list[Rate] = []
    for service, backends in sorted(
        found, key=lambda it: (-it[0].new, -it[0].refused, it[0].service)
    ):
        backends.sort(key=lambda row: (-row.new, row.backend))
        for row in backends:
            row.service = service.service
        service.open = sum(row.open for row in backends)
        rows += [service, *backends]
    return rows
