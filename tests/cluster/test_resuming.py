# SPDX-License-Identifier: Apache-2.0
"""The watch emits each change once, and resumes where it broke off, without a new list."""

import json

import pytest

from ebpflb.cluster.source import Source
from ebpflb.model.events import Changed, Event, Key, Kind, Replaced
from tests.cluster.event_log import EventLog, Start
from tests.cluster.objects import node, service
from tests.kit.api_server import FakeApiServer

WEB = Key("default", "web")


@pytest.fixture
def watched(api: FakeApiServer, events: EventLog, watch: Start) -> Source:
    """Return a source that has listed the Service web and watches."""
    api.put(service("web"))
    source = watch()
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")
    return source


def changed(event: Event, name: str) -> bool:
    return isinstance(event, Changed) and event.key.name == name


def test_events_have_the_version_and_the_name_of_the_api(
    api: FakeApiServer, events: EventLog, watched: Source
) -> None:
    """Events have the resourceVersion, and ADDED or MODIFIED in lower case, as causes in the
    history.
    """
    versions = [api.put(service("new")), api.put(service("new", clusterIP="10.96.0.2"))]
    found = [events.next(Kind.SERVICE) for _ in versions]
    assert [(it.event, it.version) for it in found] == [
        (event, str(version))
        for event, version in zip(("added", "modified"), versions, strict=True)
    ]
    api.delete(service("new"))
    assert int(events.next(Kind.SERVICE).version) > int(versions[-1])


def test_a_watch_asks_for_bookmarks_and_a_random_end(
    api: FakeApiServer, events: EventLog, watched: Source
) -> None:
    """allowWatchBookmarks is set, and timeoutSeconds is between one and two times the configured
    one.
    """
    (query,) = api.watches("Service")
    assert query["allowWatchBookmarks"] == "true"
    assert 20 <= int(query["timeoutSeconds"]) <= 40


def test_a_dropped_connection_is_resumed_without_a_list(
    api: FakeApiServer, events: EventLog, watched: Source
) -> None:
    """Changes during the interruption are emitted, and the server counts only one list."""
    version = api.put(service("seen"))
    assert changed(events.next(Kind.SERVICE), "seen")
    with api.changed:
        api.drop()
        api.put(service("meanwhile"))
    assert changed(events.next(Kind.SERVICE), "meanwhile")
    assert api.lists("Service") == 1
    assert api.watches("Service")[-1]["resourceVersion"] == version


def test_events_out_of_order_are_put_right_by_the_next_watch(
    api: FakeApiServer, events: EventLog, watched: Source
) -> None:
    """A late event with an older version counts until the next watch resumes from there and sends
    the newer object again, as in client-go. Duplicates are no error.
    """
    old = service("web", clusterIP="10.96.0.8")
    version = api.put(old)
    newest = api.put(service("web", clusterIP="10.96.0.9"))
    late = old | {"metadata": old["metadata"] | {"resourceVersion": version}}
    line = json.dumps({"type": "MODIFIED", "object": late}).encode()
    for _ in range(2):
        api.say("Service", line)
    found = [events.next(Kind.SERVICE).version for _ in range(4)]
    assert found == [version, newest, version, version]
    api.drop()
    again = events.next(Kind.SERVICE)
    assert (again.version, again.found.object.spec.cluster_ip) == (newest, "10.96.0.9")
    assert api.lists("Service") == 1


def test_a_deletion_moves_the_resume_point(
    api: FakeApiServer, events: EventLog, watched: Source
) -> None:
    """DELETED carries a version of its own, and the next watch begins there."""
    api.delete(service("web"))
    events.next(Kind.SERVICE)
    deleted = api.version
    with api.changed:
        api.drop()
        api.put(service("next"))
    assert changed(events.next(Kind.SERVICE), "next")
    assert api.watches("Service")[-1]["resourceVersion"] == deleted


def test_a_bookmark_moves_the_resume_point(
    api: FakeApiServer, events: EventLog, watched: Source
) -> None:
    """The history before a bookmark may be compacted; nothing is listed again."""
    for number in range(5):
        api.put(node(f"other-{number}"))
    newest = api.bookmark("Service")
    api.put(service("after"))
    assert changed(events.next(Kind.SERVICE), "after")
    with api.changed:
        api.compact(newest)
        api.drop()
        api.put(service("last"))
    assert changed(events.next(Kind.SERVICE), "last")
    assert api.lists("Service") == 1


@pytest.mark.parametrize("gone_in_stream", [False, True])
def test_410_gone_is_answered_by_a_new_list(
    api: FakeApiServer, events: EventLog, watched: Source, gone_in_stream: bool
) -> None:
    """A 410, as status or as ERROR event, leads to a full Replaced without deleted objects."""
    api.gone_in_stream = gone_in_stream
    with api.changed:
        api.drop()
        api.delete(service("web"))
        api.put(service("new"))
        api.compact()
    event = events.next(Kind.SERVICE)
    assert isinstance(event, Replaced)
    assert {key.name for key in event.objects} == {"new"}
    assert api.lists("Service") == 2
    api.wait_for_watch("Service")
    api.put(service("newer"))
    assert changed(events.next(Kind.SERVICE), "newer")


def test_a_broken_object_is_told_as_such(
    api: FakeApiServer, events: EventLog, watched: Source
) -> None:
    """A broken object is reported with its error, and its version still moves the resume point."""
    for ports, reason in (
        ([{"port": None}], "spec.ports[0].port: Expected integer, got null"),
        ("x", "spec.ports: Expected array | null, got string"),
    ):
        bad = api.put(service("web", ports=ports))
        found = events.next(Kind.SERVICE)
        assert (found.key, str(found.found.object)) == (WEB, reason)
    with api.changed:
        api.drop()
        api.put(service("web"))
    assert changed(events.next(Kind.SERVICE), "web")
    assert api.watches("Service")[-1]["resourceVersion"] == bad


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff\xfe", b'{"type": "ADDED"}', b""])
def test_a_line_that_is_no_event_is_passed_over(
    api: FakeApiServer,
    events: EventLog,
    watched: Source,
    caplog: pytest.LogCaptureFixture,
    line: bytes,
) -> None:
    """Garbage in the stream is one log line; the watch goes on."""
    api.say("Service", line)
    api.put(service("next"))
    assert changed(events.next(Kind.SERVICE), "next")
    assert len(caplog.messages) == 1
    assert len(api.watches("Service")) == 1
