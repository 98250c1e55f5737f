# SPDX-License-Identifier: Apache-2.0
"""The first list from the API: complete, in pages, and filtered by the server; broken objects are
named.
"""

import pytest

from ebpflb.errors import InvalidObject
from ebpflb.model.endpoint_slices import ReadSlice
from ebpflb.model.events import Changed, Event, Key, Kind, Removed, Replaced
from ebpflb.model.objects import Service
from tests.cluster.event_log import EventLog, Start
from tests.cluster.objects import HEADLESS, PROXY_NAME, endpoint_slice, node, service
from tests.kit.api_server import FakeApiServer


def names(event: Event) -> set[str]:
    assert isinstance(event, Replaced)
    return {key.name for key in event.objects}


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_a_list_is_read_page_by_page(
    api: FakeApiServer, events: EventLog, watch: Start, count: int
) -> None:
    """All pages make one Replaced, whether or not the last page is full."""
    for number in range(count):
        api.put(service(f"web-{number}"))
    watch(limit=3)
    assert names(events.next(Kind.SERVICE)) == {f"web-{number}" for number in range(count)}
    api.wait_for_watch("Service")
    pages = [it.query for it in api.requests if it.kind == "Service" and not it.is_watch]
    assert len(pages) == (count + 2) // 3
    assert {page["limit"] for page in pages} == {"3"}
    assert ["continue" in page for page in pages] == [False] + [True] * (len(pages) - 1)


def test_an_expired_continue_token_starts_the_list_again(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """After a 410 in the middle of a list nothing from it is emitted; the second list is
    complete.
    """
    for number in range(4):
        api.put(service(f"web-{number}"))
    api.expiring = 1
    watch(limit=2)
    assert names(events.next(Kind.SERVICE)) == {f"web-{number}" for number in range(4)}
    assert api.lists("Service") == 2


def test_the_api_is_asked_with_kube_proxys_selectors(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """Lists and watches alike carry exactly the selectors of kube-proxy.md 1.1."""
    watch()
    for kind in Kind:
        events.next(kind)
        api.wait_for_watch(kind)
    asked = {
        (it.kind, it.query.get("labelSelector"), it.query.get("fieldSelector"))
        for it in api.requests
    }
    assert asked == {
        ("Service", f"!{PROXY_NAME}", "spec.clusterIP!=None"),
        ("EndpointSlice", f"!{HEADLESS}", None),
        ("Node", None, "metadata.name=node-1"),
        ("ServiceCIDR", None, None),
    }


def test_what_does_not_match_is_not_told(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """Headless and foreign Services, headless slices and other nodes stay at the server."""
    api.put(service("foreign", labels={PROXY_NAME: ""}))
    api.put(service("headless", clusterIP="None"))
    api.put(service("ours"))
    api.put(endpoint_slice("headless", labels={HEADLESS: ""}))
    api.put(endpoint_slice("foreign", labels={PROXY_NAME: "x"}))
    api.put(node("node-1"))
    api.put(node("node-2"))
    watch()
    assert names(events.next(Kind.SERVICE)) == {"ours"}
    assert names(events.next(Kind.ENDPOINT_SLICE)) == {"foreign"}
    assert names(events.next(Kind.NODE)) == {"node-1"}


def test_a_label_that_ends_the_match_removes_and_one_that_begins_it_adds(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """The server turns a change of a label into DELETED or ADDED; both are emitted."""
    api.put(service("web"))
    watch()
    events.next(Kind.SERVICE)
    api.wait_for_watch("Service")
    api.put(service("web", labels={PROXY_NAME: "other"}))
    assert events.next(Kind.SERVICE) == Removed(Kind.SERVICE, Key("default", "web"))
    api.put(service("web"))
    assert isinstance(events.next(Kind.SERVICE), Changed)


def test_a_broken_object_spoils_neither_its_page_nor_the_list(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """A broken object is emitted with its kind, its name and the wrong field."""
    api.put(service("bad", ports=[{"port": "eighty"}]))
    api.put(service("good"))
    watch(limit=1)
    objects = events.next(Kind.SERVICE).objects
    assert {key.name for key in objects} == {"good", "bad"}
    assert isinstance(objects["default", "good"].object, Service)
    bad = objects["default", "bad"]
    assert str(bad.object) == "spec.ports[0].port: Expected integer, got string"
    assert bad.source == api.url


def test_slices_are_emitted_as_they_are_stored_and_those_that_cannot_be_with_the_reason(
    api: FakeApiServer, events: EventLog, watch: Start
) -> None:
    """Many slices are held until the list is complete, but in the stored form, not as decoded."""
    api.put(endpoint_slice("web-1", "10.1.0.1"))
    api.put(endpoint_slice("web-2", "10.1.0.2") | {"addressType": "IPX"})
    watch()
    objects = events.next(Kind.ENDPOINT_SLICE).objects
    assert isinstance(objects["default", "web-1"].object, ReadSlice)
    invalid = objects["default", "web-2"].object
    assert isinstance(invalid, InvalidObject)
    assert invalid.field == "addressType"


def test_an_object_without_a_name_is_one_line(
    api: FakeApiServer, events: EventLog, watch: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """An object without a name gives one line and is not emitted, but the rest is served."""
    page = b'{"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {}, "spec": {}}, 7]}'
    api.fail("Service", 200, page)
    watch()
    assert events.next(Kind.SERVICE) == Replaced(Kind.SERVICE, {})
    assert len(caplog.messages) == 2
    assert "Service without a name: metadata: " in caplog.messages[0]
