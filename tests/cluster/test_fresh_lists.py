# SPDX-License-Identifier: Apache-2.0
"""A fresh list shows what the watch has told until then, and what it has told since is known."""

import pytest

from ebpflb.cluster.source import FreshList, Source
from ebpflb.errors import ClusterError
from ebpflb.lab.agents import wait_until
from ebpflb.model.events import Key, Kind, ReadObject, Replaced
from tests.cluster.event_log import EventLog, Start
from tests.cluster.objects import service
from tests.kit.api_server import FakeApiServer

NAMES = [f"web-{number}" for number in range(5)]
LIMIT = 2


@pytest.fixture
def source(api: FakeApiServer, events: EventLog, watch: Start) -> Source:
    """A source that has listed some Services and watches them."""
    for name in NAMES:
        api.put(service(name))
    made = watch(limit=LIMIT)
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")
    return made


@pytest.fixture
def fresh(source: Source) -> FreshList:
    return next(each for each in source.fresh_lists() if each.kind is Kind.SERVICE)


def pages(fresh: FreshList) -> list[dict[Key, ReadObject]]:
    """All pages but the empty one at the end."""
    found: list[dict[Key, ReadObject]] = []

    def ended() -> bool:
        if page := fresh.page():
            found.append(dict(page))
        return page == {}

    wait_until("the list has ended", ended)
    return found


def names(found: list[dict[Key, ReadObject]]) -> set[str]:
    return {key.name for page in found for key in page}


def test_it_comes_page_by_page(api: FakeApiServer, fresh: FreshList) -> None:
    """Each page is asked for when the one before was taken."""

    def asked() -> int:
        words = [query.query.keys() for query in api.requests if query.query.get("watch") != "1"]
        return sum("resourceVersionMatch" in each or "continue" in each for each in words)

    before = asked()
    assert fresh.begin()
    wait_until("the first page is there, and the second", lambda: asked() >= before + 2)
    assert asked() == before + 2
    found = pages(fresh)
    assert names(found) == set(NAMES)
    assert [len(page) for page in found] == [2, 2, 1]


def test_it_is_of_the_version_where_the_watch_stands(
    api: FakeApiServer, events: EventLog, fresh: FreshList
) -> None:
    """What happens after that is not in it, whether the watch has told of it or not."""
    with api.changed:  # the watch tells of nothing meanwhile
        assert fresh.begin()
        api.put(service("later"))
        api.delete(service(NAMES[0]))
    assert names(pages(fresh)) == set(NAMES)
    assert [query.query["resourceVersionMatch"] for query in api.requests if begun(query.query)]
    events.next(Kind.SERVICE)
    events.next(Kind.SERVICE)
    assert fresh.changed() == {Key("default", "later"), Key("default", NAMES[0])}


def begun(query: dict[str, str]) -> bool:
    return "resourceVersionMatch" in query


def test_a_version_that_is_forgotten_is_replaced_by_the_newest(
    api: FakeApiServer, events: EventLog, fresh: FreshList
) -> None:
    """What the watch has not told yet it tells before the list ends."""
    api.compact()
    assert fresh.begin()
    api.put(service("later"))
    assert names(pages(fresh)) >= set(NAMES)
    events.next(Kind.SERVICE)
    assert fresh.changed() == {Key("default", "later")}


def test_what_was_listed_anew_has_changed_altogether(
    api: FakeApiServer, events: EventLog, fresh: FreshList
) -> None:
    """Then nothing of the fresh list can be compared."""
    assert fresh.begin()
    with api.changed:
        api.drop()
        api.compact()
    assert isinstance(events.next(Kind.SERVICE), Replaced)
    assert fresh.changed() is None
    fresh.end()


def test_who_is_distrusted_lists_and_watches_anew(
    api: FakeApiServer, events: EventLog, fresh: FreshList
) -> None:
    """At once, and what was lost is in the list."""
    api.losing = True
    api.put(service("lost"))
    api.losing = False
    fresh.distrust()
    assert fresh.restarting
    replaced = events.next(Kind.SERVICE)
    assert isinstance(replaced, Replaced)
    assert Key("default", "lost") in replaced.objects
    wait_until("it is over", lambda: not fresh.restarting)
    api.wait_for_watch("Service", 2)
    api.put(service("next"))
    assert events.next(Kind.SERVICE).key.name == "next"


def test_a_server_that_cannot_list_is_an_error_of_this_list_alone(
    api: FakeApiServer, fresh: FreshList
) -> None:
    """The next one begins anew; the watch goes on."""
    api.fail("Service", 500, b'{"code": 500, "message": "out of order"}')
    assert fresh.begin()
    with pytest.raises(ClusterError, match="out of order"):
        pages(fresh)
    fresh.end()
    assert fresh.begin()
    assert names(pages(fresh)) == set(NAMES)
    assert len(api.watches("Service")) == 1


def test_an_error_of_this_program_ends_the_list_too(
    fresh: FreshList, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits for it is told, and the next one begins anew."""

    def fail(query: object, objects: object) -> None:
        raise ValueError("not foreseen")

    with monkeypatch.context() as broken:
        broken.setattr(fresh, "_read_page", fail)
        assert fresh.begin()
        with pytest.raises(ClusterError, match="ValueError: not foreseen"):
            pages(fresh)
    assert "list Service: unexpected" in caplog.text
    fresh.end()
    assert fresh.begin()
    assert names(pages(fresh)) == set(NAMES)
