# SPDX-License-Identifier: Apache-2.0
"""An API server, or an impostor, that sends endless or unrequested data."""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from ebpflb.cluster import api as answers
from ebpflb.cluster import decoding
from ebpflb.cluster.list_watch import ApiSource
from ebpflb.cluster.source import ServerOptions
from ebpflb.model.events import Changed, Kind
from tests.cluster.event_log import NODE, QUICK, Begin, EventLog, Start
from tests.cluster.objects import service
from tests.kit.api_server import FakeApiServer
from tests.kit.http_server import Handler, Server

LIMIT = 100_000  # bytes, instead of hundreds of megabytes
LIST = json.dumps({"metadata": {"resourceVersion": "1"}, "items": []}).encode()

Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LARGEST_PAGE", "LARGEST_LINE", "LARGEST_STATUS"):
        monkeypatch.setattr(answers, name, LIMIT)
    monkeypatch.setattr(decoding, "MOST_WAITING", LIMIT // 2)
    monkeypatch.setattr(decoding, "BATCH", LIMIT // 10)


def without_end(code: int, begin: bytes = b"") -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        request.end_headers()
        request.wfile.write(begin)
        while True:
            request.wfile.write(b" " * 4096)

    return answer


def objects_without_end(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    request.wfile.write(b'{"metadata": {"resourceVersion": "1"}, "items": [')
    while True:
        request.wfile.write(b'{"metadata": {"name": "x"}},')


def whole(body: bytes, code: int = 200, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        headers["Content-Length"] = str(len(body))
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answer


@pytest.fixture
def asked(events: EventLog, tmp_path: Path, begin: Begin) -> Iterator[Callable[[Answer], str]]:
    """Return the error of a source whose server gives this answer to every request."""
    opened = ExitStack()

    def error(answer: Answer) -> str:
        kind = type("Answering", (Handler,), {"do_GET": answer})
        server = opened.enter_context(Server(("127.0.0.1", 0), kind))
        master = f"http://127.0.0.1:{server.server_port}"
        begin(
            ApiSource(
                events, node_name=NODE, server_options=ServerOptions(master=master), timing=QUICK
            )
        )
        return events.error()

    with opened:
        yield error


BOMB = gzip.compress(LIST + b" " * 100 * LIMIT)
ANSWERS: dict[str, tuple[Answer, str]] = {
    "a list without end": (without_end(200), f"a list has {LIMIT // 2} bytes without the end"),
    "an object without end": (
        without_end(200, b'{"metadata": {}, "items": [{"metadata": {"name": "x'),
        f"a list has {LIMIT // 2} bytes without the end of an object",
    ),
    "objects without end": (
        objects_without_end,
        f"the answer has more than {LIMIT} bytes",
    ),
    "an error without end": (without_end(500), f"the answer has more than {LIMIT} bytes"),
    "what is compressed": (whole(BOMB, Content_Encoding="gzip"), "not a list: "),
    "a redirect": (whole(b"", 307, Location="http://192.0.2.1/elsewhere"), "307"),
    "a redirect to itself": (whole(b"", 302, Location="/api/v1/services"), "302"),
}


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(("answer", "why"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_is_none(asked: Callable[[Answer], str], answer: Answer, why: str) -> None:
    """An invalid answer is an error: nothing is decompressed, no redirect is followed, and nothing
    is kept.
    """
    assert asked(answer).startswith(why)


@pytest.mark.usefixtures("limits")
def test_a_line_without_end(api: FakeApiServer, events: EventLog, watch: Start) -> None:
    """After an endless line the watch is opened again at the same place.

    Lines that end may have any number of pieces.
    """
    watch()
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")
    api.say("Service", b" " * 2 * LIMIT)
    assert events.error() == f"a line of the watch has more than {LIMIT} bytes"
    assert events.source_status().error is None
    api.put(service("web", labels={"long": "x" * (LIMIT // 2)}))
    assert isinstance(events.next(Kind.SERVICE), Changed)
    assert api.lists("Service") == 1
