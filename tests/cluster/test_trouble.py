# SPDX-License-Identifier: Apache-2.0
"""When the API cannot be read: told once per reason, and tried for ever with growing pauses."""

import threading

import pytest

from ebpflb.cluster.running import Runner
from ebpflb.errors import ClusterError
from ebpflb.model.events import Changed, Kind, Replaced, SourceStatus
from tests.cluster.fake_api import FakeApi
from tests.cluster.heard import Heard, Quick, Start
from tests.cluster.objects import service


def services(api: FakeApi) -> str:
    return f"{api.url}/api/v1/services"


def test_errors_of_the_server_are_trouble_until_they_are_over(
    api: FakeApi, heard: Heard, watch: Start
) -> None:
    """Many 500s are one Trouble, and the list that works at last is preceded by its end."""
    api.fail("Service", 500, b'{"code": 500, "message": "etcd is away"}', times=5)
    watch()
    assert heard.trouble() == SourceStatus(services(api), "500 etcd is away")
    assert heard.trouble() == SourceStatus(services(api), None)
    assert isinstance(heard.of(Kind.SERVICE), Replaced)
    assert api.lists("Service") == 6


def test_the_kinds_have_troubles_of_their_own(api: FakeApi, heard: Heard, watch: Start) -> None:
    """Services in trouble do not hold up slices, and are not made well by them."""
    api.fail("Service", 403, b'{"message": "services is forbidden"}', times=1000)
    watch()
    assert heard.trouble() == SourceStatus(services(api), "403 services is forbidden")
    heard.of(Kind.ENDPOINT_SLICE)
    heard.of(Kind.NODE)
    heard.of(Kind.SERVICE_CIDR)
    assert heard.everything() == []


def test_a_failing_watch_keeps_its_resume_point(api: FakeApi, heard: Heard, watch: Start) -> None:
    """A 500 to a watch is retried as a watch: listing would only add to the server's load."""
    api.put(service("web"))
    watch()
    heard.of(Kind.SERVICE)
    api.wait_for_watch("Service")
    with api.changed:
        api.fail("Service", 500, times=3)
        api.drop()
        api.put(service("new"))
    assert isinstance(heard.of(Kind.SERVICE), Changed)
    assert api.lists("Service") == 1


def test_garbage_instead_of_a_list_is_trouble(api: FakeApi, heard: Heard, watch: Start) -> None:
    """A proxy's login page is not a list."""
    api.fail("Service", 200, b"<html>", times=2)
    watch()
    assert heard.reason().startswith("not a list: ")
    assert heard.trouble().error is None


def test_an_error_event_other_than_410_is_trouble(api: FakeApi, heard: Heard, watch: Start) -> None:
    """The watch is opened again from where it was."""
    watch()
    heard.of(Kind.SERVICE)
    api.wait_for_watch("Service")
    api.say("Service", b'{"type": "ERROR", "object": {"code": 500, "message": "broken pipe"}}')
    assert heard.trouble() == SourceStatus(services(api), "500 broken pipe")
    assert heard.trouble().error is None


def test_a_server_that_is_not_there_is_found_when_it_comes(
    api: FakeApi, heard: Heard, watch: Start
) -> None:
    """Refused connections are retried for ever."""
    port = int(api.url.rpartition(":")[2])
    api.__exit__()
    watch()
    assert "refused" in heard.reason()
    with FakeApi(port=port):
        assert heard.of(Kind.SERVICE) == Replaced(Kind.SERVICE, {})


def test_a_silent_connection_is_noticed(
    api: FakeApi, heard: Heard, watch: Start, quick: Quick
) -> None:
    """A watch that says nothing beyond its time and some grace is opened anew."""
    api.muted = True
    watch(pace=quick(watch=1, grace=0.2, chance=lambda: 0.0))
    heard.of(Kind.SERVICE)
    api.wait_for_watch("Service")
    api.put(service("unheard"))
    api.wait_for_watch("Service", 2)
    api.muted = False
    api.drop()
    assert isinstance(heard.of(Kind.SERVICE), Changed)
    assert api.lists("Service") == 1


def test_an_answer_that_does_not_come_is_trouble(
    api: FakeApi, heard: Heard, watch: Start, quick: Quick
) -> None:
    """A request waits for ``Pace.answer`` and no longer."""
    api.delay = 0.5
    watch(pace=quick(answer=0.1))
    assert "timed out" in heard.reason()
    api.delay = 0.0
    assert isinstance(heard.of(Kind.SERVICE), Replaced)


def test_a_slow_answer_is_waited_for(api: FakeApi, heard: Heard, watch: Start) -> None:
    """Slow is not silent."""
    api.delay = 0.2
    watch()
    heard.of(Kind.SERVICE)
    assert api.lists("Service") == 1


def test_a_watch_that_ends_at_once_is_paused_after(
    api: FakeApi, heard: Heard, watch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that closes every watch must not be asked in a tight loop."""
    monkeypatch.setattr("ebpflb.cluster.watching.SHORT", 60.0)
    watch()
    heard.of(Kind.SERVICE)
    api.wait_for_watch("Service")
    api.drop()
    assert "as soon as it began" in heard.reason()


def test_pauses_grow_with_failures_and_begin_again_after_success(
    heard: Heard, quick: Quick
) -> None:
    """0.01, 0.02, 0.04 and no more than the cap; progress starts over; success needs no pause."""
    pace = quick(first=0.01, cap=0.05, chance=lambda: 0.999999)
    runner = Runner("it", heard, pace, threading.Event())

    def fail() -> None:
        raise ClusterError("away")

    def advance_then_fail() -> None:
        runner.progress()
        raise ClusterError("away")

    pauses = [runner.attempt(turn) for turn in (fail, fail, fail, fail, fail, advance_then_fail)]
    assert pauses == pytest.approx([0.01, 0.02, 0.04, 0.05, 0.05, 0.01], rel=0.01)
    assert runner.attempt(lambda: None) == 0
    assert heard.everything() == [SourceStatus("it", "away")]


def test_our_own_mistakes_are_trouble_and_not_the_end(
    heard: Heard, quick: Quick, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception is logged with its traceback, and tried again."""
    runner = Runner("it", heard, quick(), threading.Event())
    assert runner.attempt(lambda: print(1 // 0)) > 0
    assert "ZeroDivisionError" in heard.reason()
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()
