# SPDX-License-Identifier: Apache-2.0
"""All Services of the node, read now and then: sorted and filtered for each client.

A sorted list of the first hundred would be no list by that column, so the list is read whole.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from ebpflb.serve.service_page import ServiceRow
from ebpflb.tools.map_fill import MapFill

PART = 30  # the agent makes the list: that costs it a thirtieth of one processor at most

Latest = Mapping[str, tuple[float, float]]  # new and refused a second, by NAMESPACE/NAME


class Survey(NamedTuple):
    """All Services, sorted by name; and how full the maps are, the fullest first."""

    services: list[ServiceRow]
    maps: list[MapFill]
    notes: list[str]


class ListQuery(NamedTuple):
    """``text`` is a part of NAMESPACE/NAME, or of an address or port; ``sort`` is one of SORTS,
    and ``is_reverse`` the other way round.
    """

    text: str = ""
    namespace: str = ""
    problems: bool = False
    sort: str = "problems"
    limit: int = 100
    is_reverse: bool = False


class ServiceRows(msgspec.Struct):
    """``more`` fit too and are not in ``services``; ``namespaces`` are those of all Services."""

    services: list[ServiceRow]
    more: int
    total: int
    namespaces: list[str]
    notes: list[str]


def _problems(row: ServiceRow, latest: Latest) -> tuple[bool, float]:
    return not row.problems, -latest.get(row.service, (0, 0))[1]


SORTS: dict[str, Callable[[ServiceRow, Latest], object]] = {
    "problems": _problems,
    "service": lambda row, latest: row.service,
    "endpoints": lambda row, latest: row.used,
    "unused": lambda row, latest: -row.unused,
    "open": lambda row, latest: -(row.open or 0),
    "opened": lambda row, latest: -(row.opened or 0),
    "new": lambda row, latest: -latest.get(row.service, (0, 0))[0],
    "refused": lambda row, latest: -latest.get(row.service, (0, 0))[1],
}  # what an operator looks for is first: much traffic, few endpoints


def choose(survey: Survey, query: ListQuery, latest: Latest) -> ServiceRows:
    """The Services that fit, in their order; equal ones by name."""
    words = query.text.lower().split()
    fit = [row for row in survey.services if _fits(row, query) and _has(row, words)]
    order = SORTS[query.sort]
    fit.sort(key=lambda row: order(row, latest), reverse=query.is_reverse)  # type: ignore[arg-type,return-value]
    return ServiceRows(
        fit[: query.limit],
        max(0, len(fit) - query.limit),
        len(survey.services),
        sorted({_namespace(row) for row in survey.services}),
        survey.notes,
    )


def _fits(row: ServiceRow, query: ListQuery) -> bool:
    is_there = not query.namespace or _namespace(row) == query.namespace
    return is_there and bool(row.problems or not query.problems)


def _has(row: ServiceRow, words: list[str]) -> bool:
    """Each word stands in the row's name, an address or a port."""
    text = " ".join([row.service, *row.addresses, *row.ports]).lower()
    return all(word in text for word in words)


def _namespace(row: ServiceRow) -> str:
    return row.service.partition("/")[0]
