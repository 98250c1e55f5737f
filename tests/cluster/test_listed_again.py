# SPDX-License-Identifier: Apache-2.0
"""The periodic list: it contains what a watch has lost, and is never older."""

import json

import pytest

from ebpflb.cluster.source import Source
from ebpflb.model.events import Changed, Key, Kind, Removed, Replaced
from tests.cluster.event_log import EventLog, Quick, Start
from tests.cluster.objects import service
from tests.kit.api_history import Json
from tests.kit.api_server import FakeApiServer

OLD_LIST = b'{"metadata": {"resourceVersion": "1"}, "items": []}'


@pytest.fixture
def watched(api: FakeApiServer, events: EventLog, watch: Start, quick: Quick) -> Source:
    """Return a source that has listed the Service web, and lists again after each watch."""
    api.put(service("web"))
    source = watch(timing=quick(list_interval=0.0))
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")
    return source


def listed(events: EventLog) -> set[str]:
    """Return the names in the next list."""
    event = events.next(Kind.SERVICE)
    assert isinstance(event, Replaced)
    return {key.name for key in event.objects}


def list_queries(api: FakeApiServer) -> list[dict[str, str]]:
    """Return the queries of the lists of Services, without selectors.

    Queries with ``continue`` are included.
    """
    asked = [it.query for it in api.requests if it.kind == "Service" and not it.is_watch]
    return [{k: v for k, v in each.items() if not k.endswith("Selector")} for each in asked]


def test_what_a_watch_has_lost_is_in_the_next_list(
    api: FakeApiServer, events: EventLog, watched: Source
) -> None:
    """Objects are corrected if the event of their creation or deletion was lost.

    The watch goes on from the list.
    """
    api.losing = True
    api.put(service("lost"))
    api.delete(service("web"))
    api.losing = False
    api.put(service("told"))
    assert events.next(Kind.SERVICE).key.name == "told"
    api.drop()
    assert listed(events) == {"lost", "told"}
    api.wait_for_watch("Service", 2)
    assert api.watches("Service")[-1]["resourceVersion"] == api.version
    api.put(service("next"))
    assert events.next(Kind.SERVICE).key.name == "next"


def test_a_late_deletion_is_put_right_by_the_next_list(
    api: FakeApiServer, events: EventLog, watched: Source
) -> None:
    """The next list corrects a late DELETED for an object that has been created again since."""
    last: Json = service("web")
    late = last | {"metadata": last["metadata"] | {"resourceVersion": api.version}}
    api.say("Service", json.dumps({"type": "DELETED", "object": late}).encode())
    assert events.next(Kind.SERVICE) == Removed(Kind.SERVICE, Key("default", "web"))
    api.drop()
    assert listed(events) == {"web"}


def test_only_the_first_list_may_be_of_any_age(
    api: FakeApiServer, events: EventLog, watched: Source
) -> None:
    """The watch cache answers all lists; it would not answer a request with both a limit and a
    version.
    """
    version = api.put(service("seen"))
    events.next(Kind.SERVICE)
    api.drop()
    listed(events)
    not_older = {"resourceVersionMatch": "NotOlderThan"}
    first, second = list_queries(api)
    assert first == {"resourceVersion": "0", "limit": "500"} | not_older
    assert second == {"resourceVersion": version} | not_older


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (500, b'{"code": 500, "message": "out of order"}'),
        (429, b'{"code": 429, "message": "too many requests"}'),
        (504, b'{"code": 504, "message": "Too large resource version: 9"}'),
        (410, b'{"code": 410, "message": "too old resource version"}'),
        (200, b"<html>"),
        (200, OLD_LIST[:-3]),
        (200, OLD_LIST),
    ],
    ids=["500", "429", "504", "410", "garbage", "truncated", "older"],
)
def test_a_list_that_fails_changes_nothing(
    api: FakeApiServer,
    events: EventLog,
    watch: Start,
    quick: Quick,
    caplog: pytest.LogCaptureFixture,
    status: int,
    answer: bytes,
) -> None:
    """A failed list is logged, and the watch goes on with the same state."""
    api.put(service("web"))
    watch(timing=quick(list_interval=0.0))
    listed(events)
    api.wait_for_watch("Service")
    with api.changed:
        api.fail("Service", status, answer)
        api.drop()
        api.put(service("meanwhile"))
    found = events.next(Kind.SERVICE)
    assert isinstance(found, Changed)
    assert found.key.name == "meanwhile"
    assert "services: not listed again: " in caplog.text


def test_an_older_list_after_410_is_refused_and_the_newest_one_asked_for(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """No object of the older list is emitted."""
    api.put(service("web"))
    watch()
    listed(events)
    api.wait_for_watch("Service")
    with api.changed:
        api.fail("Service", 410)
        api.fail("Service", 200, OLD_LIST)
        api.drop()
    assert listed(events) == {"web"}
    assert "resourceVersion" not in list_queries(api)[-1]


def test_a_server_that_was_restored_from_a_backup_is_believed(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """A server that was restored from a backup is trusted, though its version is older."""
    for number in range(5):
        api.put(service(f"web-{number}"))
    watch()
    listed(events)
    api.wait_for_watch("Service")
    too_large = b'{"code": 504, "message": "Too large resource version: 6"}'
    with api.changed:
        api.fail("Service", 504, too_large, times=2)  # the watch, and the list NotOlderThan
        api.fail("Service", 200, OLD_LIST)
        api.drop()
    assert listed(events) == set()
    assert [each.get("resourceVersion") for each in list_queries(api)] == ["0", "6", None]
