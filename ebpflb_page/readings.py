# SPDX-License-Identifier: Apache-2.0
"""The values that the page shows: those that commands print with `-o json`, read by the same
tools.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ebpflb.entries.services import Frontend
from ebpflb.history import records
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.monitoring import DECISIONS, USUAL, decision_mask
from ebpflb.kernel.node import namespaces
from ebpflb.options import Paths
from ebpflb.serve.service_page import ServicePage, ServiceRow
from ebpflb.tools import ask, node_status, pins
from ebpflb.tools.events import EventFilter, EventNames, EventStream, Teller
from ebpflb.tools.explain import answer
from ebpflb.tools.explain.asking import NamedService
from ebpflb.tools.snapshot import MapFill, map_fill, require_service
from ebpflb_page.live_events import ToldBatch, WatchedEvents

# All Services of the node, read at intervals; sorted and filtered for each client.
#
# The whole list is read, because the first hundred by another order would be wrong.


PART = 30  # making the list costs the agent at most a thirtieth of one processor

Latest = Mapping[str, tuple[float, float]]  # new and refused a second, by NAMESPACE/NAME


class Survey(NamedTuple):
    """All Services, sorted by name, and the fill of the maps, the fullest first."""

    services: list[ServiceRow]
    maps: list[MapFill]
    notes: list[str]


class ListQuery(NamedTuple):
    """The wanted Services. ``text`` is part of a NAMESPACE/NAME, address or port; ``sort`` is one
    of SORTS.
    """

    text: str = ""
    namespace: str = ""
    problems: bool = False
    sort: str = "problems"
    limit: int = 100
    is_reverse: bool = False


class ServiceRows(msgspec.Struct):
    """Some of the matching Services; ``more`` counts the rest.

    ``namespaces`` has the namespaces of all Services.
    """

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
}  # likely problems first: much traffic, few endpoints


def choose(survey: Survey, query: ListQuery, latest: Latest) -> ServiceRows:
    """Return the Services that match, sorted; equal ones are sorted by name."""
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
    """Whether each word occurs in the row's name, an address or a port."""
    text = " ".join([row.service, *row.addresses, *row.ports]).lower()
    return all(word in text for word in words)


def _namespace(row: ServiceRow) -> str:
    return row.service.partition("/")[0]


LISTED_CHANGES = 500  # in one answer


class Asked(NamedTuple):
    """A connection to explain."""

    to: Frontend | NamedService
    sender: str
    port: int | None


# The names for `ebpflb explain --from`: the pods that are found on this node.


class Sender(msgspec.Struct):
    """A pod, or another network namespace that has a name."""

    name: str
    addresses: list[str]


class Senders(msgspec.Struct):
    """The clients that have a name; ``node`` has the node's own addresses."""

    pods: list[Sender]
    node: list[str]


def find_senders(state: StateDir) -> Senders:
    """Return the clients, sorted by name. Raises NodeError."""
    with pins.pinned_maps(state.directory) as maps:

        def find() -> Senders:
            named = (owner for owner in EventNames(maps).pods() if owner.pod and owner.addresses)
            pods = [Sender(it.pod, [*map(str, it.addresses)]) for it in named]
            own = [str(it) for it in namespaces.own_addresses() if not it.is_loopback]
            return Senders(sorted(pods, key=lambda pod: pod.name), own)

        return namespaces.call_in(pins.node_namespace(maps), find)


class Readings:
    """The readings of one node.

    Each call opens and closes the files and maps that it reads, because an agent may start between
    calls. All raise EbpflbError or OSError.
    """

    def __init__(self, state_dir: Path, run_dir: Path | None) -> None:
        self._state, self._run = state_dir.absolute(), run_dir

    def status(self) -> dict[str, Any]:
        """Return the data of `ebpflb status`."""
        return node_status.read_status(self._paths()).as_data()

    def survey(self) -> Survey:
        """Return the data of `ebpflb services list`, and the fill of the maps."""
        listed = ask.services(self._paths(), ("*",), sys.maxsize)
        with pins.maps_if_any(self._state) as found:
            return Survey(listed.services, map_fill(found) if found else [], listed.notes)

    def senders(self) -> Senders:
        """Return the clients that `ebpflb explain --from` knows by name."""
        return find_senders(StateDir(self._state))

    def service(self, namespace: str, name: str) -> ServicePage:
        """Return the data of `ebpflb services get`."""
        return ask.service(self._paths(), namespace, name)

    def explain(self, asked: Asked) -> dict[str, Any]:
        """Return the data of `ebpflb explain`."""
        paths = self._paths()
        state = StateDir(paths.state)
        found = answer.explain(state, paths.cache, asked.to, asked.sender, asked.port)
        found.notes += answer.agents_notes(paths, found)
        return found.as_data()

    def history(
        self, service: tuple[str, str] | None, since: float | None, limit: int
    ) -> dict[str, Any]:
        """Return the data of `ebpflb history`."""
        wanted = min(limit, LISTED_CHANGES)
        return records.latest_changes(self._paths(), service, since, wanted)._asdict()

    def events(self, wanted: EventFilter, verdicts: tuple[str, ...]) -> WatchedEvents:
        """Return the events of `ebpflb monitor`, when the agent has loaded its programs."""
        paths = self._paths()
        chosen = verdicts or tuple(USUAL)
        with ExitStack() as stack:
            maps = stack.enter_context(pins.pinned_maps(self._state))
            if wanted.service:
                require_service(maps, wanted.service)
            teller = Teller(EventNames(maps), wanted)
            stream = stack.enter_context(closing(EventStream(paths, decision_mask(chosen))))
            opened = stack.pop_all()
        numbers = {DECISIONS[word] for word in chosen}
        return WatchedEvents(_parts(opened, stream, teller, numbers), stream.end)

    def _paths(self) -> Paths:
        """Return the directories of the agent that runs now, or ran last."""
        return pins.paths(self._state, self._run)


def _parts(
    opened: ExitStack, stream: EventStream, teller: Teller, verdicts: set[int]
) -> Iterator[ToldBatch]:
    """Yield the batches of events; close everything at the end."""
    with opened:
        for part in stream.parts():
            told = (teller.tell(it) if it.verdict in verdicts else None for it in part.events)
            yield ToldBatch(told, part.lost)
