# SPDX-License-Identifier: Apache-2.0
"""If the API cannot be read, this is reported once per error, and tried forever with growing
pauses.
"""

import threading

import pytest

from ebpflb.cluster.source import RetryLoop
from ebpflb.errors import ClusterError
from ebpflb.model.events import Changed, Kind, PartStatus, Replaced, SourceStatus
from tests.cluster.event_log import EventLog, Quick, Start
from tests.cluster.objects import service
from tests.kit.api_server import FakeApiServer
from tests.kit.failing import Failing


def services(api: FakeApiServer) -> str:
    return f"{api.url}/api/v1/services"


def test_errors_of_the_server_are_reported_until_they_are_over(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """Many 500s are reported as one error, and the recovery is reported before the list that
    succeeds at last.
    """
    api.fail("Service", 500, b'{"code": 500, "message": "etcd is away"}', times=5)
    watch()
    assert events.source_status() == SourceStatus(services(api), "500 etcd is away")
    assert events.source_status() == SourceStatus(services(api), None)
    assert isinstance(events.next(Kind.SERVICE), Replaced)
    assert api.lists("Service") == 6


def test_each_kind_has_errors_of_its_own(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """Services that cannot be read do not delay slices; each kind recovers on its own."""
    api.fail("Service", 403, b'{"message": "services is forbidden"}', times=1000)
    watch()
    refused = SourceStatus(services(api), "403 services is forbidden", is_forbidden=True)
    assert events.source_status() == refused
    events.next(Kind.ENDPOINT_SLICE)
    events.next(Kind.NODE)
    events.next(Kind.SERVICE_CIDR)
    assert events.all() == []


def test_a_failing_watch_keeps_its_resume_point(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """A watch that gets a 500 is retried as a watch, because listing would only add to the server's
    load.
    """
    api.put(service("web"))
    watch()
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")
    with api.changed:
        api.fail("Service", 500, times=3)
        api.drop()
        api.put(service("new"))
    assert isinstance(events.next(Kind.SERVICE), Changed)
    assert api.lists("Service") == 1


def test_garbage_instead_of_a_watch_is_an_error(
    api: FakeApiServer, events: EventLog, watch: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy's login page has lines, but no event: it is a failure, so the next attempt waits for
    a growing pause. Only its first line is logged.
    """
    watch()
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")
    with api.changed:
        api.fail("Service", 200, b"<html>\n<body>\nplease log in\n", times=2)
        api.drop()
    said: list[str] = []  # also of the break
    while sum(error.startswith("not a watch event: ") for error in said) < 2:
        said.append(events.source_status().error or "")
    assert caplog.text.count(": not a watch event: ") == 2
    api.put(service("web"))
    assert isinstance(events.next(Kind.SERVICE), Changed)
    assert api.lists("Service") == 1


def test_a_watch_that_ends_at_once_is_paused_after(
    api: FakeApiServer, events: EventLog, watch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that closes every watch is not asked in a tight loop."""
    monkeypatch.setattr("ebpflb.cluster.list_watch.SHORT_WATCH", 60.0)
    watch()
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")
    api.drop()
    assert "as soon as it began" in events.error()


def test_pauses_grow_with_failures_and_begin_again_after_success(
    events: EventLog, quick: Quick
) -> None:
    """Pauses are 0.01, 0.02, 0.04 up to the maximum; progress resets them; after a success there is
    no pause.
    """
    timing = quick(backoff_first=0.01, backoff_max=0.05, jitter=lambda: 0.999999)
    loop = RetryLoop("it", events, timing, threading.Event())

    def fail() -> None:
        raise ClusterError("away")

    def advance_then_fail() -> None:
        loop.reset_backoff()
        raise ClusterError("away")

    pauses = [loop.run_once(turn) for turn in (fail, fail, fail, fail, fail, advance_then_fail)]
    assert pauses == pytest.approx([0.01, 0.02, 0.04, 0.05, 0.05, 0.01], rel=0.01)
    assert loop.run_once(lambda: None) == 0
    assert events.all() == [SourceStatus("it", "away")]


def test_a_kind_that_recovers_ends_the_pauses_of_the_others(
    api: FakeApiServer, events: EventLog, watch: Start, quick: Quick
) -> None:
    """After an outage every kind of object is listed at once, even a kind without changes."""

    def days_for_services() -> float:
        return 1e8 if threading.current_thread().name == "watch Service" else 0.0

    api.fail("Service", 500)
    api.fail("EndpointSlice", 500)
    watch(timing=quick(jitter=days_for_services))
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")


def test_our_own_mistakes_are_errors_and_not_the_end(
    events: EventLog, quick: Quick, failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception is logged with its traceback, and the request is tried again."""
    loop = RetryLoop("it", events, quick(), threading.Event())
    assert loop.run_once(lambda: print(1 // 0)) > 0
    assert failing.told == [
        PartStatus("it", "ZeroDivisionError: integer division or modulo by zero")
    ]
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()
