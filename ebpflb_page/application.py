# SPDX-License-Identifier: Apache-2.0
"""The page's paths and their values. Several requests may read at once, but only one may explain,
because that loads programs.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import ip_network
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ebpflb.errors import EbpflbError
from ebpflb.history import records
from ebpflb.kernel import monitoring
from ebpflb.serve.service_page import ServicePage
from ebpflb.tools.events import EventFilter
from ebpflb.tools.explain.asking import parse_question
from ebpflb.version import VERSION
from ebpflb_page.answering import BadInput, Workers, as_error, as_json
from ebpflb_page.live_events import EventsResponse, LiveEvents
from ebpflb_page.rate_meter import HOUR, STEP, Paced, RateMeter
from ebpflb_page.readings import PART, SORTS, Asked, ListQuery, Readings, Survey, choose

STATIC = Path(__file__).parent / "static"
READERS, WAITING, WAITING_TO_EXPLAIN = 4, 32, 4
SHOWN_ROWS = 200  # of lists without pages
MOST_SERVICES = 1000  # in one answer
PAGE_ROWS = 100  # endpoints of a service port
CHANGE_ROWS = 500  # service ports of all changes in one answer

Respond = Callable[[Request], Awaitable[Response | EventsResponse]]


class _Point(NamedTuple):
    """One moment in the overview: unused endpoints, and how full the fullest map is.

    ``received``: the seconds since the API sent the last object, for the kind that has been silent
    the longest.
    """

    at: float
    unused: float
    fullest: float
    received: float


class Api:
    """Answers requests; each method answers one path."""

    def __init__(self, source: Readings, meter: RateMeter) -> None:
        self._source, self._meter = source, meter
        self._readers = Workers(READERS, WAITING, "too many requests at once: try again")
        self._status, self._survey = Paced(source.status, 10), Paced(source.survey, PART)
        self._live = LiveEvents()
        self._kept = deque[_Point](maxlen=int(HOUR / STEP))
        self._explains = Workers(
            1, WAITING_TO_EXPLAIN, "too many explain requests at once: try again"
        )

    def routes(self) -> list[Route]:
        found = {
            "status": self._node_status,
            "overview": self._overview,
            "services": self._services,
            "service": self._service,
            "choices": self._choices,
            "explain": self._explain,
            "history": self._history,
            "events": self._events,
        }
        return [Route(f"/{name}", _answered(each)) for name, each in found.items()]

    async def _node_status(self, request: Request) -> Any:
        """Answer with the status of the command, the version of this page, and the node's time."""
        status = await self._readers.run(self._status.get)
        return {"version": VERSION, "now": datetime.now(UTC).isoformat(), **status}

    async def _overview(self, request: Request) -> Any:
        """Answer with rates, the fill of the maps, and the Services that have a problem."""

        def read() -> dict[str, Any]:
            survey, rates = self._survey.get(), self._meter.node()
            listed = choose(survey, ListQuery(problems=True), self._meter.latest())
            unused = sum(row.unused for row in survey.services)
            return {
                "rates": rates,
                "kept": self._keep(unused, survey),
                "used": sum(row.used for row in survey.services),
                "unused": unused,
                "maps": survey.maps,
                "list": listed,
                "age": round(self._survey.age, 1),
            }

        return await self._readers.run(read)

    def _keep(self, unused: int, survey: Survey) -> dict[str, list[float]]:
        """Return what the overview showed in the last hour, with a point every STEP."""
        now = time.monotonic()
        if not self._kept or now - self._kept[-1].at >= STEP:
            share = max((it.entries / it.limit for it in survey.maps if it.limit), default=0.0)
            self._kept.append(_Point(now, unused, round(share, 4), oldest(self._status.get())))
        points = [it for it in self._kept if now - it.at <= HOUR]
        found = dict(zip(_Point._fields, map(list, zip(*points, strict=True)), strict=True))
        return {"ages": [now - at for at in found.pop("at")], **found}

    async def measure(self) -> None:
        """Measure the node's rates, also while no client asks, until this task is cancelled."""
        while True:
            with suppress(EbpflbError, OSError):
                await asyncio.to_thread(self._meter.node)
            await asyncio.sleep(STEP)

    async def _services(self, request: Request) -> Any:
        """Answer with the matching rows of `ebpflb services list`, and their rates."""
        query = list_query(request)

        def read() -> dict[str, Any]:
            listed = choose(self._survey.get(), query, self._meter.latest())
            rates = self._meter.of(row.service for row in listed.services)
            return {"list": listed, "rates": rates, "age": round(self._survey.age, 1)}

        return await self._readers.run(read)

    async def _choices(self, request: Request) -> Any:
        """Answer with the choices for the page's fields (pods, verdicts) and the node's own
        addresses.
        """
        found = await self._readers.run(self._source.senders)
        verdicts = sorted(monitoring.DECISIONS)
        return {"pods": found.pods, "node": found.node, "verdicts": verdicts}

    async def _service(self, request: Request) -> Any:
        """Answer with the data of `ebpflb services get`: one page of endpoints, and rates and a
        graph.
        """
        name, row = service_name(text(request, "name")), number(request, "page", 1)

        def read() -> dict[str, Any]:
            found = self._source.service(*name)
            (rates,) = self._meter.of(["/".join(name)]).services.values()
            problems, pages = found.problems, cut(found, row)
            graph = self._meter.graph("/".join(name))
            numbers = {"rates": rates, "graph": graph, "pages": pages}
            return {"page": found, "problems": problems, **numbers}

        return await self._readers.run(read)

    async def _explain(self, request: Request) -> Any:
        """Answer with the data of `ebpflb explain`, and at most SHOWN_ROWS of its endpoints."""
        asked = question(request)
        found = await self._explains.run(lambda: self._source.explain(asked))
        endpoints = found["endpoints"]
        more = max(0, len(endpoints) - SHOWN_ROWS)
        return {**found, "endpoints": endpoints[:SHOWN_ROWS], "more_endpoints": more}

    async def _history(self, request: Request) -> Any:
        """Answer with the latest changes as the command prints them.

        Unless ``whole`` is requested, they name at most CHANGE_ROWS service ports in all, and count
        the rest.
        """
        name, since = text(request, "service", ""), text(request, "since", "")
        service, begin = service_name(name) if name else None, moment(since) if since else None
        limit = number(request, "limit", SHOWN_ROWS)
        found = await self._readers.run(lambda: self._source.history(service, begin, limit))
        return found if "whole" in request.query_params else latest_rows(found)

    async def _events(self, request: Request) -> Any:
        wanted, words = event_filter(request), verdicts(request)
        return self._live.response(lambda: self._source.events(wanted, words))


def oldest(status: Mapping[str, Any]) -> float:
    """Return the seconds since the source sent the last object, for the kind that has been silent
    the longest.
    """
    now, times = datetime.now(UTC), status.get("last_received") or {}
    return max(
        ((now - datetime.fromisoformat(it)).total_seconds() for it in times.values()), default=0
    )


def _answered(method: Callable[[Request], Awaitable[Any]]) -> Respond:
    """Return a handler that answers with the value as JSON, or with the error as a sentence."""

    async def respond(request: Request) -> Response | EventsResponse:
        try:
            found = await method(request)
            return found if isinstance(found, EventsResponse | Response) else as_json(found)
        except Exception as error:
            return as_error(error)

    return respond


def application(api: Api) -> Starlette:
    """Return the application without its guard."""
    nothing = Route("/{path:path}", _answered(_no_such_path))
    return Starlette(
        routes=[
            Mount("/api", routes=[*api.routes(), nothing]),
            Route("/", lambda _: FileResponse(STATIC / "index.html")),
            Mount("/static", StaticFiles(directory=STATIC)),
            nothing,
        ]
    )


async def _no_such_path(request: Request) -> Response:
    raise BadInput("no such page: it is at /", 404)


def cut(found: ServicePage, page: int) -> int:
    """Keep one page of PAGE_ROWS endpoints of each service port; return the number of pages."""
    lists: list[list[Any]] = [*(port.endpoints for port in found.ports), found.left_out]
    pages = max(1, *(-(-len(rows) // PAGE_ROWS) for rows in lists))
    first = PAGE_ROWS * (page - 1)
    for rows in lists:
        rows[:] = rows[first : first + PAGE_ROWS]
    return pages


def latest_rows(found: dict[str, Any]) -> dict[str, Any]:
    """Return the newest changes, with CHANGE_ROWS service ports in all; a change without ports
    counts as one.

    ``more_services`` counts the ports left out of a change; ``earlier`` counts the changes left
    out.
    """
    kept: list[dict[str, Any]] = []
    left, changes = CHANGE_ROWS, found["changes"]
    for change in reversed(changes):
        if left <= 0:
            break
        more = change.more_services + max(0, len(change.services) - left)
        fields = {**msgspec.structs.asdict(change), "services": change.services[:left]}
        kept.insert(0, {**fields, "more_services": more})
        left -= max(1, len(change.services))
    return {**found, "changes": kept, "earlier": found["earlier"] + len(changes) - len(kept)}


# The parameters of requests; all functions raise BadInput with the reason.

_LONGEST = 300  # characters of a parameter


def text(request: Request, name: str, default: str | None = None) -> str:
    """Return a parameter. Raises BadInput if it is missing or too long."""
    found = request.query_params.get(name) or default
    if found is None:
        raise BadInput(f"{name} is missing")
    if len(found) > _LONGEST:
        raise BadInput(f"{name} is longer than {_LONGEST} characters")
    return found


def number(request: Request, name: str, default: int, most: int = 1_000_000) -> int:
    """Return a numeric parameter. Raises BadInput if it is not a number from 1 to ``most``."""
    found = text(request, name, str(default))
    if not (found.isascii() and found.isdecimal() and 0 < int(found) <= most):
        raise BadInput(f"{name} is not a number from 1 to {most}")
    return int(found)


def list_query(request: Request) -> ListQuery:
    """Return the query for Services: filter and order. Raises BadInput."""
    sort = text(request, "sort", "problems")
    if sort not in SORTS:
        raise BadInput(f'"{sort}" is not one of {", ".join(SORTS)}')
    query = request.query_params
    return ListQuery(
        text(request, "match", ""),
        text(request, "namespace", ""),
        "problems" in query,
        sort,
        number(request, "limit", ListQuery().limit, MOST_SERVICES),
        "reverse" in query,
    )


def service_name(name: str) -> tuple[str, str]:
    """Split a NAMESPACE/NAME. Raises BadInput for other text."""
    namespace, _, service = name.partition("/")
    if not (namespace and service) or "/" in service:
        raise BadInput(f'"{name}" is not NAMESPACE/NAME such as default/web')
    return namespace, service


def question(request: Request) -> Asked:
    """Return the connection to explain. Raises BadInput."""
    try:
        to = parse_question(text(request, "to"))
    except ValueError as error:
        raise BadInput(str(error)) from None
    port = number(request, "from_port", 1, 65535) if "from_port" in request.query_params else None
    sender = text(request, "from", "node")
    if sender.startswith("/") or ".." in sender:  # root would open it
        raise BadInput("from is a name or an address: only the command takes a path")
    return Asked(to, sender, port)


def moment(words: str) -> float:
    """Return a time, in seconds since the epoch. Raises BadInput."""
    try:
        return records.parse_time(words, time.time())
    except ValueError as error:
        raise BadInput(str(error)) from None


def event_filter(request: Request) -> EventFilter:
    """Return the filter for the wanted events. Raises BadInput."""
    service, client = text(request, "service", ""), text(request, "client", "")
    if service:
        service_name(service)
    try:
        return EventFilter(service or None, ip_network(client) if client else None)
    except ValueError:
        example = "10.244.1.0/24"
        raise BadInput(f'"{client}" is not an address or network such as {example}') from None


def verdicts(request: Request) -> tuple[str, ...]:
    """Return the wanted verdicts; an empty list means the usual ones. Raises BadInput."""
    words = tuple(request.query_params.getlist("verdict"))
    for word in words:
        if word not in monitoring.DECISIONS:
            usual = ", ".join(sorted(monitoring.USUAL))
            raise BadInput(f'"{word}" is not a verdict such as {usual}')
    return words
