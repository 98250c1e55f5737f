# SPDX-License-Identifier: Apache-2.0
"""An API server that is too old for ServiceCIDR: ranges are unknown, and nothing else fails."""

import logging

import pytest

from ebpflb.lab.manifests import service_cidr
from ebpflb.model.events import Key, Kind, Replaced, SourceStatus
from tests.cluster.event_log import EventLog, Quick, Start
from tests.cluster.objects import service
from tests.kit.api_server import FakeApiServer

NOT_FOUND = b'{"code": 404, "message": "the server could not find the requested resource"}'
RANGE = service_cidr("10.96.0.0/16")


@pytest.mark.parametrize("body", [NOT_FOUND, b"404 page not found\n"])
def test_a_resource_that_is_not_there_is_an_empty_list(
    api: FakeApiServer,
    events: EventLog,
    watch: Start,
    caplog: pytest.LogCaptureFixture,
    body: bytes,
) -> None:
    """A missing resource is emitted as an empty list, with one line and no error.

    Every other kind is served.
    """
    caplog.set_level(logging.INFO, "ebpflb")
    api.fail("ServiceCIDR", 404, body, times=1000)
    watch()
    assert events.next(Kind.SERVICE_CIDR) == Replaced(Kind.SERVICE_CIDR, {})
    for kind in set(Kind) - {Kind.SERVICE_CIDR}:
        assert isinstance(events.next(kind), Replaced)
    assert events.all() == []
    (line,) = caplog.messages
    assert line.startswith(f"{api.url}/apis/networking.k8s.io/v1/servicecidrs: no ServiceCIDR here")


def test_what_was_there_stays_when_the_resource_goes(
    api: FakeApiServer, events: EventLog, watch: Start, quick: Quick
) -> None:
    """Objects that were listed before a server's downgrade stay."""
    api.put(RANGE)
    watch(timing=quick(missing_resource_delay=0.01))
    events.next(Kind.SERVICE_CIDR)
    api.wait_for_watch("ServiceCIDR")
    with api.changed:
        api.fail("ServiceCIDR", 404, NOT_FOUND, times=3)
        api.drop()
    assert set(events.next(Kind.SERVICE_CIDR).objects) == {Key("", "kubernetes")}
    others = [event for event in events.all() if not isinstance(event, SourceStatus)]
    assert Kind.SERVICE_CIDR not in {event.kind for event in others}


def test_a_refusal_is_an_error(api: FakeApiServer, events: EventLog, watch: Start) -> None:
    """The operator has to grant a missing permission; other kinds are not held up."""
    api.fail("ServiceCIDR", 403, b'{"message": "servicecidrs is forbidden"}', times=1000)
    watch()
    assert events.error() == "403 servicecidrs is forbidden"
    events.next(Kind.SERVICE)


def test_services_must_be_there(api: FakeApiServer, events: EventLog, watch: Start) -> None:
    """404 for a required resource is an error, not an empty list."""
    api.put(service("web"))
    api.fail("Service", 404, NOT_FOUND, times=2)
    watch()
    assert events.error().startswith("404 ")
    assert events.next(Kind.SERVICE).objects
