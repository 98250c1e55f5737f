# SPDX-License-Identifier: Apache-2.0
"""What the page shows: the values that the commands print with `-o json`, by their functions."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from ebpflb.cli import common, explain, history, maps, monitor, status
from ebpflb.cli.services import maps_if_any
from ebpflb.history.past import Past
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.monitoring import DECISIONS, USUAL, decision_mask
from ebpflb.plan.entries import Frontend
from ebpflb.plan.service_page import ServiceList, ServicePage
from ebpflb.tools import service_pages
from ebpflb.tools.events import EventFilter, EventNames, EventStream, Teller
from ebpflb.tools.explain import answer
from ebpflb.tools.service_pages import Wanted
from ebpflb_page.live_events import ToldBatch, WatchedEvents

LISTED_SERVICES, LISTED_CHANGES = 500, 500  # in one answer


class Asked(NamedTuple):
    """A connection to explain."""

    to: Frontend
    sender: str
    port: int | None


class Readings:
    """Of one node. Each call opens what it reads, and closes it: an agent may start meanwhile.

    All raise EbpflbError or OSError.
    """

    def __init__(self, state_dir: Path, run_dir: Path | None) -> None:
        self._state, self._run = state_dir.absolute(), run_dir

    def status(self) -> dict[str, Any]:
        """As `ebpflb status`."""
        return status.status_data(common.paths(self._state, self._run))

    def services(self, pattern: str, limit: int) -> ServiceList:
        """As `ebpflb services list`; ``pattern`` is of NAMESPACE/NAME, as a shell has them."""
        wanted = Wanted((pattern,), min(limit, LISTED_SERVICES))
        with maps_if_any(self._state) as found:
            return service_pages.listed(common.paths(self._state, self._run), found, wanted)

    def service(self, namespace: str, name: str) -> ServicePage:
        """As `ebpflb services get`."""
        with maps_if_any(self._state) as found:
            paths = common.paths(self._state, self._run)
            return service_pages.page(paths, found, namespace, name)

    def explain(self, asked: Asked) -> dict[str, Any]:
        """As `ebpflb explain`."""
        paths = common.paths(self._state, self._run)
        state = StateDir(paths.state)
        found = answer.explain(state, paths.cache, asked.to, asked.sender, asked.port)
        return explain.as_data(found)

    def history(
        self, service: tuple[str, str] | None, since: float | None, limit: int
    ) -> dict[str, Any]:
        """As `ebpflb history`."""
        paths = common.paths(self._state, self._run)
        wanted = min(limit, LISTED_CHANGES)
        return history.latest_changes(paths, service, since, wanted)._asdict()

    def events(self, wanted: EventFilter, verdicts: tuple[str, ...]) -> WatchedEvents:
        """As `ebpflb monitor`; returns when the agent has its programs in force."""
        paths = common.paths(self._state, self._run)
        chosen = verdicts or tuple(USUAL)
        with ExitStack() as stack:
            maps = stack.enter_context(common.pinned_maps(self._state))
            if wanted.service:
                monitor.require_service(wanted.service, maps)
            teller = Teller(EventNames(maps), wanted)
            stream = stack.enter_context(closing(EventStream(paths, decision_mask(chosen))))
            opened = stack.pop_all()
        numbers = {DECISIONS[word] for word in chosen}
        return WatchedEvents(_parts(opened, stream, teller, numbers), stream.end)

    def maps_at(self, at: float, names: tuple[str, ...]) -> dict[str, Any]:
        """As `ebpflb maps dump --at`."""
        past = Past(common.paths(self._state, self._run))
        return {**maps.past_maps(past, at, names)._asdict(), "notes": past.notes}


def _parts(
    opened: ExitStack, stream: EventStream, teller: Teller, verdicts: set[int]
) -> Iterator[ToldBatch]:
    """Closes all at the end."""
    with opened:
        for part in stream.parts():
            told = (teller.tell(it) if it.verdict in verdicts else None for it in part.events)
            yield ToldBatch(told, part.lost)
