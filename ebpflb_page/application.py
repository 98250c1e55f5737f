# SPDX-License-Identifier: Apache-2.0
"""Which path gives which value. Several read at a time; one explains, as that loads programs."""

import time
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ebpflb.history import past
from ebpflb.history.recorder import RECORDED
from ebpflb.kernel import monitoring
from ebpflb.plan.service_page import ServiceList, ServicePage
from ebpflb.tools.events import EventFilter
from ebpflb.tools.explain.asking import parse_question
from ebpflb_page.answering import BadInput, as_error, as_json
from ebpflb_page.live_events import EventsResponse, LiveEvents, WatchedEvents
from ebpflb_page.rate_meter import Measured
from ebpflb_page.readings import Asked
from ebpflb_page.request_workers import Workers

STATIC = Path(__file__).parent / "static"
READERS, WAITING, WAITING_TO_EXPLAIN = 4, 32, 4
SHOWN_ROWS = 200  # of what is no page
PAGE_ROWS = 100  # endpoints of a service port

Respond = Callable[[Request], Awaitable[Response | EventsResponse]]


class PageSource(Protocol):
    """What is read; ``Readings`` is one."""

    def status(self) -> dict[str, Any]: ...

    def services(self, pattern: str, limit: int) -> ServiceList: ...

    def service(self, namespace: str, name: str) -> ServicePage: ...

    def explain(self, asked: Asked) -> dict[str, Any]: ...

    def history(
        self, service: tuple[str, str] | None, since: float | None, limit: int
    ) -> dict[str, Any]: ...

    def events(self, wanted: EventFilter, verdicts: tuple[str, ...]) -> WatchedEvents: ...

    def maps_at(self, at: float, names: tuple[str, ...]) -> dict[str, Any]: ...


class Meter(Protocol):
    """What measures rates; ``RateMeter`` is one."""

    def of(self, services: Iterable[str]) -> Measured: ...


class Api:
    """Each method answers one path."""

    def __init__(self, source: PageSource, meter: Meter) -> None:
        self._source, self._meter = source, meter
        self._readers = Workers(READERS, WAITING, "too many requests at once: try again")
        self._live = LiveEvents()
        self._explains = Workers(
            1, WAITING_TO_EXPLAIN, "too many explain requests at once: try again"
        )

    def routes(self) -> list[Route]:
        found = {
            "status": self._status,
            "services": self._services,
            "service": self._service,
            "explain": self._explain,
            "history": self._history,
            "maps": self._maps,
            "events": self._events,
        }
        return [Route(f"/{name}", _answered(each)) for name, each in found.items()]

    async def _status(self, request: Request) -> Any:
        return await self._readers.run(self._source.status)

    async def _services(self, request: Request) -> Any:
        """The list as the command has it, and the rates of its services."""
        pattern, limit = text(request, "match", "*/*"), number(request, "limit", 100)

        def read() -> dict[str, Any]:
            listed = self._source.services(pattern, limit)
            return {"list": listed, "rates": self._meter.of(row.service for row in listed.services)}

        return await self._readers.run(read)

    async def _service(self, request: Request) -> Any:
        """The Service as the command has it, but of its endpoints one page; and its rates."""
        name, row = service_name(text(request, "name")), number(request, "page", 1)

        def read() -> dict[str, Any]:
            found = self._source.service(*name)
            (rates,) = self._meter.of(["/".join(name)]).services.values()
            problems, pages = found.problems, cut(found, row)
            return {"page": found, "problems": problems, "rates": rates, "pages": pages}

        return await self._readers.run(read)

    async def _explain(self, request: Request) -> Any:
        """The answer as the command has it, but of its endpoints the first SHOWN_ROWS."""
        asked = question(request)
        found = await self._explains.run(lambda: self._source.explain(asked))
        endpoints = found["endpoints"]
        more = max(0, len(endpoints) - SHOWN_ROWS)
        return {**found, "endpoints": endpoints[:SHOWN_ROWS], "more_endpoints": more}

    async def _history(self, request: Request) -> Any:
        """The latest changes as the command has them."""
        name, since = text(request, "service", ""), text(request, "since", "")
        service, begin = service_name(name) if name else None, moment(since) if since else None
        limit = number(request, "limit", SHOWN_ROWS)
        return await self._readers.run(lambda: self._source.history(service, begin, limit))

    async def _events(self, request: Request) -> Any:
        wanted, words = event_filter(request), verdicts(request)
        return self._live.response(lambda: self._source.events(wanted, words))

    async def _maps(self, request: Request) -> Any:
        """What one map held at a time, as the command has it, but the first SHOWN_ROWS rows.

        Times of changes are written in whole milliseconds: all of that millisecond counts.
        """
        at, name = moment(text(request, "at")) + 0.000_999, text(request, "map")
        if name not in RECORDED:
            raise BadInput(f'"{name}" is not a recorded map: {", ".join(RECORDED)}')
        found = await self._readers.run(lambda: self._source.maps_at(at, (name,)))
        rows = found["maps"][name]
        more = max(0, len(rows) - SHOWN_ROWS)
        return {**found, "maps": {name: rows[:SHOWN_ROWS]}, "more": more}


def _answered(method: Callable[[Request], Awaitable[Any]]) -> Respond:
    """What it returns as JSON, and what it raises as a sentence."""

    async def respond(request: Request) -> Response | EventsResponse:
        try:
            found = await method(request)
            return found if isinstance(found, EventsResponse | Response) else as_json(found)
        except Exception as error:
            return as_error(error)

    return respond


def application(api: Api) -> Starlette:
    """Without the guard."""
    nothing = _answered(_no_such_path)
    return Starlette(
        routes=[
            Mount("/api", routes=[*api.routes(), Route("/{path:path}", nothing)]),
            Route("/", lambda _: FileResponse(STATIC / "index.html")),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )


async def _no_such_path(request: Request) -> Response:
    raise BadInput("no such page", 404)


def cut(found: ServicePage, page: int) -> int:
    """Leaves PAGE_ROWS endpoints of each service port; returns how many pages there are."""
    lists: list[list[Any]] = [*(port.endpoints for port in found.ports), found.left_out]
    pages = max(1, *(-(-len(rows) // PAGE_ROWS) for rows in lists))
    first = PAGE_ROWS * (page - 1)
    for rows in lists:
        rows[:] = rows[first : first + PAGE_ROWS]
    return pages


# What a request asks for, by its parameters; all raise BadInput that says what is wrong.

_LONGEST = 300  # characters of a parameter


def text(request: Request, name: str, default: str | None = None) -> str:
    """Raises BadInput if it is missing or too long."""
    found = request.query_params.get(name) or default
    if found is None:
        raise BadInput(f"{name} is missing")
    if len(found) > _LONGEST:
        raise BadInput(f"{name} is longer than {_LONGEST} characters")
    return found


def number(request: Request, name: str, default: int, most: int = 1_000_000) -> int:
    """Raises BadInput if it is no number from 1 to ``most``."""
    found = text(request, name, str(default))
    if not (found.isascii() and found.isdecimal() and 0 < int(found) <= most):
        raise BadInput(f"{name} is not a number from 1 to {most}")
    return int(found)


def service_name(name: str) -> tuple[str, str]:
    """Raises BadInput if it is not NAMESPACE/NAME."""
    namespace, _, service = name.partition("/")
    if not (namespace and service) or "/" in service:
        raise BadInput(f'"{name}" is not NAMESPACE/NAME such as default/web')
    return namespace, service


def question(request: Request) -> Asked:
    """What to explain. Raises BadInput."""
    try:
        to = parse_question(text(request, "to"))
    except ValueError as error:
        raise BadInput(str(error)) from None
    port = number(request, "from_port", 1, 65535) if "from_port" in request.query_params else None
    return Asked(to, text(request, "from", "node"), port)


def moment(words: str) -> float:
    """Seconds since the epoch. Raises BadInput."""
    try:
        return past.parse_time(words, time.time())
    except ValueError as error:
        raise BadInput(str(error)) from None


def event_filter(request: Request) -> EventFilter:
    """Which events are wanted. Raises BadInput."""
    service, client = text(request, "service", ""), text(request, "client", "")
    if service:
        service_name(service)
    try:
        return EventFilter(service or None, ip_network(client) if client else None)
    except ValueError:
        example = "10.244.1.0/24"
        raise BadInput(f'"{client}" is not an address or network such as {example}') from None


def verdicts(request: Request) -> tuple[str, ...]:
    """Which are wanted; none: the usual ones. Raises BadInput."""
    words = tuple(request.query_params.getlist("verdict"))
    for word in words:
        if word not in monitoring.DECISIONS:
            usual = ", ".join(sorted(monitoring.USUAL))
            raise BadInput(f'"{word}" is not a verdict such as {usual}')
    return words
