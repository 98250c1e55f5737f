# SPDX-License-Identifier: Apache-2.0
"""A watch whose connection is open and sends nothing, not even the bookmark of each minute."""

from collections.abc import Callable

from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import service_cidr
from ebpflb.model.events import Changed, Kind, SourceStatus
from tests.cluster.event_log import EventLog, Quick, Start
from tests.cluster.objects import endpoint_slice, node, service
from tests.kit.api_server import FakeApiServer

SILENCE = 0.3  # seconds, instead of 150


def of_services(events: EventLog, api: FakeApiServer) -> Callable[[], list[str | None]]:
    """Return the errors about Services so far, with None for each recovery."""
    found: list[str | None] = []

    def now() -> list[str | None]:
        statuses = [it for it in events.all() if isinstance(it, SourceStatus)]
        found.extend(it.error for it in statuses if it.source == f"{api.url}/api/v1/services")
        return found

    return now


def test_a_hung_watch_is_told_and_opened_anew_where_it_was(
    api: FakeApiServer, events: EventLog, watch: Start, quick: Quick
) -> None:
    """The TCP connection is alive but silent: this is an error until the next watch is opened."""
    api.put(service("web"))
    silent: list[str] = []
    api.muted = True
    watch(timing=quick(watch_silence=SILENCE), on_silent=silent.append)
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")
    api.put(service("unheard"))
    errors = of_services(events, api)
    wait_until("it is told, and over", lambda: len(errors()) >= 2)
    said = "the watch sent nothing for 0.3 s, although the API server sends a bookmark every minute"
    assert errors()[:2] == [said, None]
    assert "Service" in silent
    api.muted = False
    api.drop()  # the fake server's open watches wait for ever
    assert isinstance(events.next(Kind.SERVICE), Changed)
    assert api.lists("Service") == 1


def test_a_server_without_bookmarks_is_no_error_again_and_again(
    api: FakeApiServer, events: EventLog, watch: Start, quick: Quick
) -> None:
    """Each new watch proves that the server works; the log is not filled."""
    api.muted = True
    silent: list[str] = []
    watch(timing=quick(watch_silence=SILENCE), on_silent=silent.append)
    events.next(Kind.SERVICE)
    errors = of_services(events, api)
    wait_until("four watches were silent", lambda: silent.count("Service") >= 4)
    assert sum("the watch sent nothing" in (error or "") for error in errors()) == 1
    assert api.lists("Service") == 1


def test_it_is_known_when_each_kind_was_last_received(
    api: FakeApiServer, events: EventLog, watch: Start, quick: Quick
) -> None:
    """Lists, the start of a watch, events and bookmarks update the time.

    The age does not change when the clock is set.
    """
    now, set_by = [1000.0], [0.0]
    source = watch(
        timing=quick(clock=lambda: now[0] + set_by[0], monotonic=lambda: now[0], watch_timeout=600)
    )
    for kind in Kind:
        events.next(kind)
        api.wait_for_watch(kind)
    for item in (
        service("web"),
        endpoint_slice("web"),
        node("node-1"),
        service_cidr("10.96.0.0/16"),
    ):
        api.put(item)
        events.next(Kind(item["kind"]))  # then the beginning of its watch has been noted too
    assert source.received() == dict.fromkeys(map(str, Kind), 1000.0)
    now[0] = 1001.0
    for kind in Kind:
        api.bookmark(kind)
    wait_until("again", lambda: source.received() == dict.fromkeys(map(str, Kind), 1001.0))
    now[0] = 1060.0
    api.bookmark("Service")
    wait_until("the bookmark was", lambda: source.received()["Service"] == 1060.0)
    assert source.received()["Node"] == 1001.0
    for set_by[0] in (3600.0, -3600.0):
        assert source.received()["Service"] == 1060.0 + set_by[0]
        assert source.received()["Node"] == 1001.0 + set_by[0]
    assert [len(api.watches(kind)) for kind in Kind] == [1] * len(Kind)
