# SPDX-License-Identifier: Apache-2.0
"""Live events for a page: bounded however many there are, and ended when their client leaves."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.errors import NodeError
from ebpflb.lab.agents import wait_until
from tests.page.asgi import Node, get, guarded

SECONDS = 60.0
FIELDS = "time hook verdict protocol process pod client service frontend backend backend_pod device"


def event(number: int) -> Any:
    from ebpflb.tools.events import Told

    return Told(**dict.fromkeys(FIELDS.split(), f"x\x1b{number}"), pid=number, ns=number)


class Agent:
    """An agent that emits this many events, then waits for the end or ends by itself."""

    def __init__(self, count: int, *, ends: bool = False) -> None:
        self.count, self.ends, self.ended = count, ends, threading.Event()

    def opened(self) -> Any:
        from ebpflb_page.live_events import WatchedEvents

        return WatchedEvents(self.parts(), self.ended.set)

    def parts(self) -> Iterator[Any]:
        from ebpflb_page.live_events import ToldBatch

        events = (event(it) if it % 2 == 0 else None for it in range(2 * self.count))
        yield ToldBatch(events, 7)
        if not self.ends:
            assert self.ended.wait(SECONDS)


def feed(agent: Agent) -> Any:
    from ebpflb_page.live_events import EventFeed

    return EventFeed(agent.opened)


def after(made: Any, true: Any) -> dict[str, Any]:
    """Return the feed's output once the condition is true for it."""
    found: dict[str, Any] = {"events": []}

    def taken() -> bool:
        events = found["events"]
        found.update(made.take())
        found["events"] = events + found["events"]
        return bool(true(found))

    wait_until("the feed's events", taken, SECONDS)
    return found


def test_events_are_told_in_their_order() -> None:
    """Events that pass the filter come in order, with the agent's losses."""
    agent = Agent(5)
    made = feed(agent)
    made.start()
    found = after(made, lambda it: it["lost"] == 7)
    assert [it.pid for it in found["events"]] == [0, 2, 4, 6, 8]
    assert (found["left_out"], found["error"], found["begun"]) == (0, "", True)
    made.end()
    wait_until("its end", lambda: made.take()["error"], SECONDS)


def test_a_flood_is_counted_and_left_out() -> None:
    """Events for a client that reads nothing are counted and need no memory."""
    from ebpflb_page.live_events import MOST_KEPT

    made = feed(Agent(20_000, ends=True))
    made.start()
    wait_until("all are counted", lambda: made.error, SECONDS)
    found = made.take()
    assert len(found["events"]) <= MOST_KEPT
    assert len(found["events"]) + found["left_out"] == 20_000


def test_the_end_of_the_agent_is_said() -> None:
    """The reason why events cannot be watched is sent, too."""
    from ebpflb_page.live_events import ENDED, EventFeed

    made = feed(Agent(1, ends=True))
    made.start()
    assert after(made, lambda it: it["error"])["error"] == ENDED

    def refused() -> Any:
        raise NodeError("no agent is running: start `ebpflb run`")

    none = EventFeed(refused)
    none.start()
    assert after(none, lambda it: it["error"])["error"].startswith("no agent is running")


def test_a_client_that_has_gone_ends_its_feed() -> None:
    """A client that leaves ends its feed, even if it leaves before the agent has answered."""
    agent = Agent(1)
    may_open = threading.Event()

    def slowly() -> Any:
        assert may_open.wait(SECONDS)
        return agent.opened()

    from ebpflb_page.live_events import EventFeed, EventsResponse

    feeds: set[Any] = set()
    response = EventsResponse(EventFeed(slowly), feeds)

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert len(feeds) == 1

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(response(scope, gone, send))
    assert feeds == set()
    may_open.set()
    assert agent.ended.wait(SECONDS)


def test_events_are_escaped_and_sent() -> None:
    """Events are sent as server-sent events, escaped, until the agent ends."""
    node = Node()
    node.answers["events"] = Agent(2, ends=True).opened()
    found = get(guarded(node), "/api/events", service="default/web", client="10.0.0.0/8")
    assert found.headers["content-type"].startswith("text/event-stream")
    assert found.body.startswith(b"data: {") and found.body.endswith(b"\n\n")
    assert rb"x\\x1b2" in found.body
    (asked,) = node.asked
    assert (asked[1].service, str(asked[1].client), asked[2]) == ("default/web", "10.0.0.0/8", ())


def test_one_page_watches_at_a_time() -> None:
    """The agent serves one monitor: a second page is refused with a sentence."""
    from ebpflb_page.answering import BadInput
    from ebpflb_page.live_events import MOST_FEEDS, LiveEvents

    made = LiveEvents()
    made.feeds |= {feed(Agent(0)) for _ in range(MOST_FEEDS)}
    with pytest.raises(BadInput) as refused:
        made.response(Agent(0).opened)
    assert refused.value.status == 503
