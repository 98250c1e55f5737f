# SPDX-License-Identifier: Apache-2.0
"""What the page shows: the values that the commands print with `-o json`, of the same tools."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from ebpflb.entries.services import Frontend
from ebpflb.history import records
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.monitoring import DECISIONS, USUAL, decision_mask
from ebpflb.options import Paths
from ebpflb.serve.service_page import ServicePage
from ebpflb.tools import node_status, pins, service_pages
from ebpflb.tools.events import EventFilter, EventNames, EventStream, Senders, Teller, find_senders
from ebpflb.tools.explain import answer
from ebpflb.tools.explain.asking import NamedService
from ebpflb.tools.map_fill import map_fill
from ebpflb.tools.service_pages import Wanted
from ebpflb.tools.snapshot import require_service
from ebpflb_page.live_events import ToldBatch, WatchedEvents
from ebpflb_page.service_list import Survey

LISTED_CHANGES = 500  # in one answer


class Asked(NamedTuple):
    """A connection to explain."""

    to: Frontend | NamedService
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
        return node_status.read_status(self._paths()).as_data()

    def survey(self) -> Survey:
        """As `ebpflb services list`, all of them; and how full the maps are."""
        with pins.maps_if_any(self._state) as found:
            listed = service_pages.listed(self._paths(), found, Wanted(("*",), sys.maxsize))
            return Survey(listed.services, map_fill(found) if found else [], listed.notes)

    def senders(self) -> Senders:
        """Whom `ebpflb explain --from` knows by name."""
        return find_senders(StateDir(self._state))

    def service(self, namespace: str, name: str) -> ServicePage:
        """As `ebpflb services get`."""
        with pins.maps_if_any(self._state) as found:
            return service_pages.page(self._paths(), found, namespace, name)

    def explain(self, asked: Asked) -> dict[str, Any]:
        """As `ebpflb explain`."""
        paths = self._paths()
        state = StateDir(paths.state)
        found = answer.explain(state, paths.cache, asked.to, asked.sender, asked.port)
        return found.as_data()

    def history(
        self, service: tuple[str, str] | None, since: float | None, limit: int
    ) -> dict[str, Any]:
        """As `ebpflb history`."""
        wanted = min(limit, LISTED_CHANGES)
        return records.latest_changes(self._paths(), service, since, wanted)._asdict()

    def events(self, wanted: EventFilter, verdicts: tuple[str, ...]) -> WatchedEvents:
        """As `ebpflb monitor`; returns when the agent has its programs in force."""
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
        """The directories of the agent that runs now, or ran last."""
        return pins.paths(self._state, self._run)


def _parts(
    opened: ExitStack, stream: EventStream, teller: Teller, verdicts: set[int]
) -> Iterator[ToldBatch]:
    """Closes all at the end."""
    with opened:
        for part in stream.parts():
            told = (teller.tell(it) if it.verdict in verdicts else None for it in part.events)
            yield ToldBatch(told, part.lost)
