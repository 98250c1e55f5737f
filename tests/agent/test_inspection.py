# SPDX-License-Identifier: Apache-2.0
"""The agent's answers about services, while its loop runs."""

from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from ebpflb.agent import inspection, loop
from ebpflb.agent.inspection import Inspection, local_pages
from ebpflb.agent.loop import Inbox
from ebpflb.agent.sync import Sync
from ebpflb.entries.services import BackendLoad
from ebpflb.model.events import Kind
from ebpflb.serve.listener import Handler, Request, Response
from ebpflb.serve.service_page import ServiceList, ServicePage
from tests.agent.fakes import Harness, changed, listed, service, slices

MAPS: Any = {
    "service_stats": SimpleNamespace(get=lambda _: (4, 3, 2, 1)),
    "backend_stats": SimpleNamespace(get_many=lambda ids: dict.fromkeys(ids, (7, 5))),
    "backend_loads": SimpleNamespace(get=lambda _: BackendLoad()),
}


def pages(inbox: Inbox, sync: Sync) -> Handler:
    return local_pages({"/v1/service": Inspection(inbox, sync, MAPS).respond})


@pytest.fixture
def asked(harness: Harness) -> Handler:
    """Return the handler of an agent that has three Services."""
    harness.start()
    names = ("api", "db", "web")
    harness.send(
        listed(Kind.SERVICE, *(service(name, f"10.96.0.{i}") for i, name in enumerate(names, 1))),
        listed(Kind.ENDPOINT_SLICE, slices("web", "10.1.0.1", "10.1.0.2")),
        listed(Kind.NODE),
    )
    harness.wait_for(lambda status: status.service_ports == len(names))
    return pages(harness.inbox, harness.sync)


def get(asked: Handler, path: str, query: Any = ()) -> Response:
    return asked(Request(path, "", urlencode(query)))


def names(asked: Handler, *patterns: str, **query: object) -> list[str]:
    words = [("match", pattern) for pattern in patterns] + list(query.items())
    found = msgspec.json.decode(get(asked, "/v1/services", words).body, type=ServiceList)
    return [row.service for row in found.services]


def test_a_page_shows_the_current_plan(asked: Handler) -> None:
    """The page shows one Service as it is currently planned, with its counters."""
    response = get(asked, "/v1/service", {"namespace": "default", "name": "web"})
    page = msgspec.json.decode(response.body, type=ServicePage)
    assert (response.status, page.service, page.notes) == (200, "default/web", [])
    assert [(row.endpoint, row.opened, row.open) for row in page.ports[0].endpoints] == [
        ("10.1.0.1:8080", 7, 2),
        ("10.1.0.2:8080", 7, 2),
    ]
    assert page.ports[0].counters["chosen"] == 4


def test_services_are_listed_part_by_part(asked: Handler) -> None:
    """Services are listed by name, by pattern, and in parts."""
    assert names(asked) == ["default/api", "default/db", "default/web"]
    assert names(asked, "*/w*", "default/a?i") == ["default/api", "default/web"]
    assert names(asked, "other/*") == []
    assert names(asked, after="default/api", limit=1) == ["default/db"]
    part = get(asked, "/v1/services", {"limit": 1})
    assert msgspec.json.decode(part.body, type=ServiceList).more == 2
    assert get(asked, "/v1/services", {"limit": "x"}).status == 400


def test_invalid_and_headless(harness: Harness, asked: Handler) -> None:
    """The page of a Service that is not served as written says so."""
    harness.send(changed(Kind.SERVICE, service("web", "not-an-address")))
    harness.send(changed(Kind.SERVICE, service("headless", "None")))
    pages = [
        get(asked, "/v1/service", {"namespace": "default", "name": name}).body
        for name in ("web", "headless")
    ]
    invalid, headless = (msgspec.json.decode(page, type=ServicePage) for page in pages)
    assert invalid.notes[0].startswith("invalid: spec.clusterIP")
    assert invalid.ports[0].endpoints  # of its last good state
    assert headless.notes == [inspection.NOTHING_SERVED]


def test_a_busy_loop_gives_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop does not answer in time, the response is 503, and the call is not made later."""
    monkeypatch.setattr(loop, "ANSWER_SECONDS", 0.01)
    inbox, nothing = Inbox(), SimpleNamespace(cluster=None)
    response = get(pages(inbox, nothing), "/v1/services")  # type: ignore[arg-type]
    assert response.status == 503
    call: Any = inbox.take(0.0)
    call.answer()  # does not ask: that would raise
