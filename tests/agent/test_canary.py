# SPDX-License-Identifier: Apache-2.0
"""Doctor's canary in the agent: how long it stays, when it is refused, what it affects."""

from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from ebpflb.agent.canary_sync import UplinkCanary
from ebpflb.agent.inspection import local_pages
from ebpflb.kernel.map_writer import CAPACITY
from ebpflb.lab.agents import wait_until
from ebpflb.model.events import Kind
from ebpflb.plan.canary import is_canary
from ebpflb.serve.listener import Handler, Request, Response
from tests.agent.fakes import Harness, listed, service, slices

WISH = {"nodeport": "30999"}


@pytest.fixture
def asked(harness: Harness) -> Handler:
    """Return the handler of an agent that is not started yet."""

    def canary(request: Request) -> Response:
        return UplinkCanary(harness.inbox, harness.canary, harness.node_sync).respond(request)

    return local_pages({"/v1/canary/": canary})


def begin(harness: Harness) -> None:
    """Let the agent serve one Service."""
    harness.start()
    harness.send(
        listed(Kind.SERVICE, service("web", "10.96.0.3")),
        listed(Kind.ENDPOINT_SLICE, slices("web", "10.1.0.1")),
        listed(Kind.NODE),
    )
    harness.wait_for(lambda status: status.in_sync)


def ask(asked: Handler, what: str, query: Any) -> tuple[int, Any]:
    response = asked(Request(f"/v1/canary/{what}", "", urlencode(query)))
    return response.status, msgspec.json.decode(response.body)


def written(harness: Harness) -> list[str]:
    names = harness.datapath.read_contents().entries
    return [str(name) for name in names if is_canary(name)]


def test_from_its_beginning_to_its_end(harness: Harness, asked: Handler) -> None:
    """The canary is in the maps once the agent answers; nothing else changes or counts it."""
    begin(harness)
    before = harness.status
    status, lease = ask(asked, "hold", WISH)
    assert status == 200 and len(written(harness)) == 4
    assert ask(asked, "hold", WISH) == (200, lease)
    harness.send()
    now = harness.status
    assert (now.service_ports, now.backends) == (before.service_ports, before.backends)
    assert ask(asked, "hold", {"nodeport": "30998"})[1] != lease and len(written(harness)) == 4
    assert ask(asked, "end", {})[0] == 200 and written(harness) == []
    assert ask(asked, "hold", WISH)[1] != lease


def test_a_mistake_of_ours_in_its_write(harness: Harness, asked: Handler) -> None:
    """After any exception during the canary's write, the agent writes everything again."""
    begin(harness)
    harness.datapath.failures.append(RuntimeError("a mistake"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a mistake"):
        ask(asked, "hold", WISH)
    harness.wait_for(lambda status: status.in_sync and not harness.service_sync.must_start_over)
    wait_until("nothing of it is there", lambda: not written(harness))


@pytest.mark.parametrize(
    "small",
    [
        {"services": 1},
        {"services": 4},
        {"service_ids": 2},
        {"backend_ids": 2},
        {"slots": 2},
        {"source_ranges": 1},
    ],
)
def test_a_full_map(harness: Harness, asked: Handler, small: dict[str, int]) -> None:
    """A full map gets no canary and no part of one; no Service waits because of it."""
    harness.datapath.capacity = CAPACITY._replace(**small)
    begin(harness)
    status, said = ask(asked, "hold", WISH)
    assert status == 409 and said["error"].startswith("map "), said
    assert written(harness) == []
    harness.send()
    assert not harness.status.not_programmed and harness.status.service_ports == 1
    assert not any(is_canary(it) for it in harness.service_sync.planner.claims.desired)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"shadow": True}, "--shadow"), ({"namespaces": frozenset({"default"})}, "--namespaces")],
)
def test_not_with_these_options(
    harness: Harness, asked: Handler, options: dict[str, Any], said: str
) -> None:
    harness.options = replace(harness.options, **options)
    begin(harness)
    status, answer = ask(asked, "hold", WISH)
    assert status == 409 and said in answer["error"]


@pytest.mark.parametrize("wrong", [{}, {"nodeport": "0"}, {"nodeport": "65536"}, {"nodeport": "x"}])
def test_wrong_requests(harness: Harness, asked: Handler, wrong: dict[str, str]) -> None:
    """An invalid request gets an error, and the agent goes on."""
    begin(harness)
    assert ask(asked, "hold", wrong)[0] == 400
    assert written(harness) == [] and ask(asked, "hold", WISH)[0] == 200
