# SPDX-License-Identifier: Apache-2.0
"""Events about the Node and its Services, as kube-proxy writes them (kube-proxy.md 17)."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ebpflb.cluster import event_recorder
from ebpflb.cluster.event_recorder import (
    NODE_BURST,
    NODE_SECONDS,
    QUEUE_SIZE,
    Event,
    EventRecorder,
    manifest,
)
from ebpflb.cluster.source import ServerOptions
from ebpflb.errors import ClusterError
from ebpflb.model.events import Key, PartStatus
from tests.cluster.event_log import NODE, QUICK
from tests.kit.api_history import Json
from tests.kit.api_server import WAIT_SECONDS, FakeApiServer
from tests.kit.failing import Failing

Said = tuple[event_recorder.Reference, event_recorder.Severity, str, str, str]
WEB = event_recorder.service(Key("shop", "web"))
STARTING: Said = (event_recorder.node(NODE), "Normal", "Starting", "StartKubeProxy", "")
FAILED: Said = (WEB, "Warning", "FailedToStartServiceHealthcheck", "Listen", "port 32000: taken")
NOW = 1_700_000_000_123_456_789

Record = Callable[..., EventRecorder]


@pytest.fixture
def record(api: FakeApiServer, tmp_path: Path) -> Iterator[Record]:
    """Start recorders for the fake server."""
    started: list[EventRecorder] = []

    def record(
        clock: Callable[[], float] = time.monotonic, stop_timeout: float = 2.0
    ) -> EventRecorder:
        server = event_recorder.server_factory(ServerOptions(api.kubeconfig(tmp_path)))
        started.append(
            EventRecorder(server, NODE, timing=QUICK, clock=clock, stop_timeout=stop_timeout)
        )
        started[-1].start()
        return started[-1]

    yield record
    for it in started:
        it.stop()


def failed(number: int) -> Said:
    about, severity, reason, action, _ = FAILED
    return about, severity, reason, action, f"the {number}th"


def created(api: FakeApiServer, count: int) -> list[Json]:
    """Return the events that the server has received, once this many have arrived."""
    with api.changed:
        assert api.changed.wait_for(lambda: len(api.created) >= count, WAIT_SECONDS)
        return list(api.created)


def notes(api: FakeApiServer, count: int) -> list[str]:
    return [event["note"] for event in created(api, count)]


def test_starting_on_the_node(api: FakeApiServer, record: Record) -> None:
    """The Node's event is in the namespace default, and has the Node's name as uid, like
    kube-proxy's.
    """
    record().event(*STARTING)
    (event,) = created(api, 1)
    assert event["regarding"] == {"kind": "Node", "apiVersion": "v1", "name": NODE, "uid": NODE}
    assert event["metadata"]["namespace"] == "default"
    assert (event["type"], event["reason"]) == ("Normal", "Starting")
    assert (event["action"], event["note"]) == ("StartKubeProxy", "")
    assert event["reportingController"] == "ebpflb"
    assert event["reportingInstance"] == f"ebpflb-{NODE}"
    assert (event["apiVersion"], event["kind"]) == ("events.k8s.io/v1", "Event")


def test_failure_on_a_service(api: FakeApiServer, record: Record) -> None:
    """The event is in the Service's own namespace."""
    record().event(*FAILED)
    (event,) = created(api, 1)
    assert event["metadata"]["namespace"] == "shop"
    assert event["regarding"] == {
        "kind": "Service",
        "apiVersion": "v1",
        "namespace": "shop",
        "name": "web",
        "uid": "shop/web",
    }
    assert (event["type"], event["note"]) == ("Warning", "port 32000: taken")


def test_time_and_name() -> None:
    """The MicroTime has six digits; the event's name is the object's with the time in
    hexadecimal.
    """
    _, body = manifest(Event(*FAILED), "it", NOW)
    event = json.loads(body)
    assert event["eventTime"] == "2023-11-14T22:13:20.123456Z"
    assert event["metadata"]["name"] == f"web.{NOW:x}"


def test_long_note_and_long_name_are_cut() -> None:
    """A note is cut to the API server's 1,024 bytes, an instance to 128; no character is split."""
    _, body = manifest(Event(*FAILED[:4], "ü" * 1000 + "x"), "it", NOW)
    assert json.loads(body)["note"] == "ü" * 512
    long = EventRecorder(lambda: pytest.fail("not asked for"), "n" * 253)
    long.event(*STARTING)
    event, at = long.waiting[0]
    (_, body) = manifest(event, long.instance, at)
    assert len(json.loads(body)["reportingInstance"]) == 128


def test_events_about_one_object_are_limited(api: FakeApiServer, record: Record) -> None:
    """Each object gets 25 events at once, and one more in five minutes, as in client-go."""
    seconds = [0.0]
    it = record(lambda: seconds[0])
    for number in range(100):
        it.event(*failed(number))
    it.event(*STARTING)
    assert notes(api, 26) == [f"the {number}th" for number in range(25)] + [""]
    for at in (299.0, 300.0, 301.0):
        seconds[0] = at
        it.event(*failed(int(at)))
    assert notes(api, 27)[26:] == ["the 300th"]
    it.stop()
    assert (len(api.created), it.dropped) == (27, 75 + 2)


def test_events_of_all_tenants_leave_room_for_the_nodes(api: FakeApiServer, record: Record) -> None:
    """The node sends 100 events at once, then one in ten seconds, however many objects change.

    Events about the Node itself are always sent.
    """
    seconds = [0.0]
    it = record(lambda: seconds[0])
    for number in range(300):
        it.event(event_recorder.service(Key("shop", f"s{number}")), *FAILED[1:])
        if not number % 50:
            created(api, min(number + 1, NODE_BURST))  # none is dropped because it waits
    it.event(*STARTING)
    created(api, NODE_BURST + 1)
    seconds[0] = NODE_SECONDS
    it.event(*FAILED)
    assert notes(api, NODE_BURST + 2)[NODE_BURST:] == ["", "port 32000: taken"]
    assert it.dropped == 300 - NODE_BURST


def test_server_that_is_away_is_tried_again(
    api: FakeApiServer, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    """While the server is away no event is lost or sent twice, and one line says why."""
    api.fail("Event", 500, b'{"message": "etcd is away"}', times=3)
    it = record()
    it.event(*STARTING)
    it.event(*FAILED)
    assert notes(api, 2) == ["", "port 32000: taken"]
    assert [line for line in caplog.messages if "500 etcd is away" in line] == [
        "events cannot be sent to the API server: 500 etcd is away"
    ]
    assert it.dropped == 0


@pytest.mark.parametrize("code", [400, 403, 404, 409, 422])
def test_refused_event_is_dropped_and_said_once(
    api: FakeApiServer, record: Record, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """If RBAC forbids events, or the namespace is being deleted, trying again cannot help."""
    api.fail("Event", code, b'{"message": "events is forbidden"}', times=3)
    it = record()
    for number in range(4):
        it.event(*failed(number))
    assert notes(api, 1) == ["the 3th"]
    assert len([line for line in caplog.messages if "events is forbidden" in line]) == 1
    assert it.dropped == 3
    assert len(api.requests) == 4


def test_never_blocks_and_drops_the_oldest(api: FakeApiServer, record: Record) -> None:
    """While the server is silent a limited number of events waits.

    The newest events are sent in the end.
    """
    api.delay = 0.3
    it = record(stop_timeout=WAIT_SECONDS)
    names = [f"node-{number}" for number in range(3 * QUEUE_SIZE)]  # none is limited
    for name in names:
        it.event(event_recorder.node(name), "Normal", "Starting", "StartKubeProxy", name)
    with api.changed:
        api.delay = 0.0
    it.stop()
    sent = notes(api, QUEUE_SIZE)
    assert sent[-QUEUE_SIZE:] == names[2 * QUEUE_SIZE :]
    assert it.dropped == 3 * QUEUE_SIZE - len(sent)


def test_stop_does_not_wait_for_a_server_that_is_away(record: Record, api: FakeApiServer) -> None:
    """stop() waits only a moment; stopping twice, or before a start, does nothing."""
    api.fail("Event", 500, times=1000)
    it = record(stop_timeout=0.05)
    it.event(*FAILED)
    it.stop()
    it.stop()
    EventRecorder(lambda: pytest.fail("not asked for"), NODE).stop()
    assert api.created == []


def test_without_an_api_server_there_are_no_events() -> None:
    """The text of each event is in the log anyway."""
    it = EventRecorder(None, NODE)
    it.start()
    it.event(*STARTING)
    it.stop()
    assert not it.waiting and not it.dropped


# If sending an event fails for any reason, the next ones are sent too.


def test_events_are_sent_after_an_unforeseen_failure(
    failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    """After any failure this event and all later ones are sent; a bug is logged."""
    sent: list[str] = []
    failures = [RuntimeError("can't start new thread"), ClusterError("away")]

    class Server:
        def create(self, path: str, body: bytes) -> None:
            if failures:
                raise failures.pop(0)
            sent.append(json.loads(body)["note"])

    sending = EventRecorder(cast(Any, Server), NODE, timing=QUICK, stop_timeout=WAIT_SECONDS)
    sending.start()
    for number in range(2):
        _record(sending, f"the {number}th")
    sending.stop()
    assert sent == ["the 0th", "the 1th"]
    assert "events cannot be sent to the API server: away" in caplog.messages
    assert failing.told == [
        PartStatus("events", "RuntimeError: can't start new thread"),
        PartStatus("events", None),
    ]
    caplog.clear()


def test_gives_up_in_the_end() -> None:
    """After any other failure there are twelve attempts; then the next event gets its own
    attempts.
    """
    asked: list[bytes] = []
    done = threading.Event()

    class Broken:
        def create(self, path: str, body: bytes) -> None:
            asked.append(body)
            if len(asked) == 13:
                done.set()
            raise ClusterError("no route to host")

    it = EventRecorder(cast(Any, Broken), NODE, timing=QUICK, stop_timeout=0.0)
    it.start()
    for note in ("first", "second"):
        _record(it, note)
    assert done.wait(WAIT_SECONDS)
    it.stop()
    assert len(set(asked[:12])) == 1
    assert asked[12] != asked[0]
    assert it.dropped >= 1


def _record(recorder: EventRecorder, note: str) -> None:
    recorder.event(event_recorder.node(NODE), "Normal", "Starting", "StartKubeProxy", note)
