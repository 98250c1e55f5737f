# SPDX-License-Identifier: Apache-2.0
"""Requests to the page's application without a socket, and a node that it shows."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from ebpflb.errors import NotFound
from ebpflb.serve.service_page import EndpointRow, PortPage, ServicePage, ServiceRow
from ebpflb.tools.snapshot import MapFill

OURS = "localhost:10251"


class Got(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def said(self) -> Any:
        return json.loads(self.body)


class Node:
    """A node that returns, or raises, the answers that a test has set."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"status": {"verdict": "OK", "reasons": []}}
        self.asked: list[tuple[Any, ...]] = []

    def answer(self, *words: Any) -> Any:
        self.asked.append(words)
        found = self.answers[words[0]]
        if isinstance(found, BaseException):
            raise found
        return found

    def status(self) -> Any:
        return self.answer("status")

    def survey(self) -> Any:
        return self.answer("survey")

    def senders(self) -> Any:
        return self.answer("senders")

    def service(self, namespace: str, name: str) -> Any:
        return self.answer("service", namespace, name)

    def explain(self, asked: Any) -> Any:
        return self.answer("explain", *asked)

    def history(self, service: Any, since: Any, limit: int) -> Any:
        return self.answer("history", service, since, limit)

    def events(self, wanted: Any, verdicts: tuple[str, ...]) -> Any:
        return self.answer("events", wanted, verdicts)


class NoRates:
    """A rate meter that measures nothing."""

    def node(self) -> Any:
        from ebpflb_page.rate_meter import NodeRates

        return NodeRates()

    def of(self, services: Iterable[str]) -> Any:
        from ebpflb_page.rate_meter import Measured, ServiceRates

        return Measured([], {name: ServiceRates() for name in services})

    def latest(self) -> Any:
        return {}

    def graph(self, service: str) -> Any:
        from ebpflb_page.rate_meter import Graph

        return Graph()


def page_of(endpoints: int, name: str = "default/web") -> ServicePage:
    rows = [EndpointRow(f"10.0.0.{i}:80", "node", f"web-{i}", "used") for i in range(endpoints)]
    return ServicePage(name, [PortPage(f"{name}:tcp/TCP", "IPv4", "TCP", 1, 0, [], rows)])


def row(name: str, used: int = 1, problem: str = "", **more: Any) -> ServiceRow:
    """Return the row of a Service in a list."""
    problems = [problem] if problem else []
    return ServiceRow(name, ["80/TCP"], ["10.96.0.1"], [], used, 0, [], problems, **more)


def survey_of(*rows: ServiceRow) -> Any:
    from ebpflb_page.readings import Survey

    return Survey([*rows], [MapFill("slots", 3, 4)], [])


def no_such_service() -> NotFound:
    return NotFound("no Service default/wob: did you mean default/web?")


def api(node: Node) -> Any:
    """Return the answers of this node, without rates."""
    from ebpflb_page.application import Api

    source: Any = node
    meter: Any = NoRates()
    return Api(source, meter)


def guarded(node: Node, token: str = "", hosts: tuple[str, ...] = ()) -> Any:
    """Return the application behind its guard."""
    from ebpflb_page.application import application
    from ebpflb_page.web_server import Guard

    return Guard(application(api(node)), hosts, token)


def get(
    app: Any, path: str, headers: Mapping[str, str] | None = None, method: str = "GET", **query: Any
) -> Got:
    """Send a request; the Host is ours unless another one is given; with None it is left out."""
    sent: list[Any] = []
    given = {"host": OURS, **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": urlencode(query).encode(),
        "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items() if v is not None],
        "client": ("127.0.0.1", 1),
        "server": ("192.0.2.1", 10251),
    }

    bodies = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        """Return the request once; after that the client only waits."""
        return bodies.pop() if bodies else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return Got(sent[0]["status"], found, b"".join(it.get("body", b"") for it in sent[1:]))
