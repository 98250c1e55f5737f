# SPDX-License-Identifier: Apache-2.0
"""Services as pages: from the running agent, with the counters of the pinned maps.

Only the agent knows labels, which endpoints are not used, and why.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from ebpflb.errors import NodeError, one_line
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import BackendCounters, ServiceCounters
from ebpflb.options import Paths
from ebpflb.serve.service_page import ServiceList, ServicePage, ServiceRow
from ebpflb.tools import ask
from ebpflb.tools.ask import NoAnswer

_INSTEAD = "{}: only the agent knows its Services; `ebpflb maps dump {}` shows what the maps hold"

_Found = TypeVar("_Found", ServicePage, ServiceList)


def page(paths: Paths, maps: Mapping[str, Map] | None, namespace: str, name: str) -> ServicePage:
    """Return the Service's page.

    Raises NotFound if there is no such Service, with the names that are most like it, and NodeError
    if no agent answers.
    """
    instead = f"--service {namespace}/{name}"
    found = _answered(lambda: ask.service(paths, namespace, name), instead)
    if maps is not None:
        _count(found, maps)
    return found


def listed(
    paths: Paths,
    maps: Mapping[str, Map] | None,
    patterns: tuple[str, ...],
    limit: int,
    selector: str = "",
) -> ServiceList:
    """Return the Services that fit a shell pattern of NAMESPACE/NAME and a selector as of kubectl's
    -l, sorted by name; ``more`` says how many match beyond the limit.

    Raises NodeError if no agent answers.
    """
    found = _answered(lambda: ask.services(paths, patterns, selector, limit), "services")
    if maps is not None:
        _count_rows(found.services, maps)
    return found


def _answered(asked: Callable[[], _Found], instead: str) -> _Found:
    try:
        return asked()
    except NoAnswer as reason:
        raise NodeError(_INSTEAD.format(reason, one_line(instead))) from None


def _count(page: ServicePage, maps: Mapping[str, Map]) -> None:
    for port in page.ports:
        if port.id:
            port.counters = ServiceCounters(*maps["service_stats"].get(port.id))._asdict()
        counts = _connections(maps, (row.id for row in port.endpoints if row.id))
        for row in port.endpoints:
            if row.id:
                row.opened, row.open = counts[row.id]


def _connections(maps: Mapping[str, Map], backends: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return opened and open connections of sockets; with least-connections also those of
    packets.
    """
    found, loads = {}, maps["backend_loads"]
    for id, counts in maps["backend_stats"].get_many({*backends}).items():
        counters, counted = BackendCounters(*counts), loads.get(id).open
        found[id] = counters.opened, max(counted, counters.opened - counters.closed, 0)
    return found


def _count_rows(rows: list[ServiceRow], maps: Mapping[str, Map]) -> None:
    counts = _connections(maps, (backend for row in rows for backend in row.backends))
    for row in rows:
        own = [counts[backend] for backend in row.backends]
        row.opened, row.open = (sum(column) for column in zip((0, 0), *own, strict=True))
