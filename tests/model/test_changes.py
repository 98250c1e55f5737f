# SPDX-License-Identifier: Apache-2.0
"""Which events touch which services (kube-proxy.md 2, 16.3): work follows what changed."""

import pytest

from ebpflb.model.events import Changed, Found, Key, Kind, Removed, Replaced
from ebpflb.model.objects import Object
from ebpflb.model.picture import Picture
from ebpflb.model.selection import Selection
from tests.model import builders

WEB, OTHER = Key("shop", "web"), Key("shop", "other")
SLICE, SECOND = Key("shop", "web-abcde"), Key("shop", "web-fghij")
HERE = Key("", "here")
ZONE = "topology.kubernetes.io/zone"


@pytest.fixture
def picture() -> Picture:
    """A service, another one, and a slice of the first."""
    found = Picture("here")
    say(found, WEB, builders.service())
    say(found, OTHER, builders.service(name="other", clusterIPs=["172.30.0.42"]))
    say(found, SLICE, builders.slice(builders.entry("10.1.0.1")))
    found.take_touched()
    return found


def say(picture: Picture, key: Key, object: Object) -> set[Key]:
    """Tells of an object; the services that this touches."""
    kind = Kind(type(object).__name__)
    assert picture.hear(Changed(kind, key, Found(object, "test.yaml"))) == []
    return picture.take_touched()


def forget(picture: Picture, kind: Kind, key: Key) -> set[Key]:
    picture.hear(Removed(kind, key))
    return picture.take_touched()


def endpoints(picture: Picture, service: Key = WEB) -> list[str]:
    """The addresses of the cluster lists of all ports."""
    found: list[Selection] = [selection for _, selection in picture.ports(service)]
    return [str(each.address) for selection in found for each in selection.cluster]


def test_equal_service(picture: Picture) -> None:
    """A Service that reads the same as before is no change: a label, another status (16.3)."""
    for service in (
        builders.service(),
        builders.service(labels={"app": "web"}),
        builders.service(ingress=[{"hostname": "lb.example.org"}]),
    ):
        assert say(picture, WEB, service) == set()


def test_change_taken_back(picture: Picture) -> None:
    """A change that is taken back leaves what there was: the same ports, the same endpoints."""
    before = list(picture.ports(WEB))
    assert say(picture, WEB, builders.service(ports=[{"port": 81}])) == {WEB}
    assert list(picture.ports(WEB)) != before
    say(picture, WEB, builders.service())
    assert list(picture.ports(WEB)) == before


def test_equal_slice(picture: Picture) -> None:
    """A slice that is equal to the one known is no change (2)."""
    assert say(picture, SLICE, builders.slice(builders.entry("10.1.0.1"))) == set()
    assert say(picture, SLICE, builders.slice(builders.entry("10.1.0.2"))) == {WEB}


def test_unknown_slice_removed(picture: Picture) -> None:
    """Removing a slice or a service that nobody knows is no change (2)."""
    assert forget(picture, Kind.ENDPOINT_SLICE, SECOND) == set()
    assert forget(picture, Kind.SERVICE, Key("shop", "nobody")) == set()


def test_slice_before_its_service() -> None:
    """A slice may come before its Service: it is kept, and has no effect until then (2)."""
    picture = Picture("here")
    say(picture, SLICE, builders.slice(builders.entry("10.1.0.1")))
    assert endpoints(picture) == []
    assert say(picture, WEB, builders.service()) == {WEB}
    assert endpoints(picture) == ["10.1.0.1"]


def test_slice_outlives_its_service(picture: Picture) -> None:
    """A slice may outlive its Service: who comes back finds its endpoints (2)."""
    assert forget(picture, Kind.SERVICE, WEB) == {WEB}
    assert endpoints(picture) == []
    assert say(picture, WEB, builders.service()) == {WEB}
    assert endpoints(picture) == ["10.1.0.1"]


def test_one_slice_of_two_goes(picture: Picture) -> None:
    """Deleting one slice removes only its own endpoints (2)."""
    both = builders.entry("10.1.0.1"), builders.entry("10.1.0.2")
    assert say(picture, SECOND, builders.slice(*both, name=SECOND.name)) == {WEB}
    assert endpoints(picture) == ["10.1.0.1", "10.1.0.2"]
    assert forget(picture, Kind.ENDPOINT_SLICE, SECOND) == {WEB}
    assert endpoints(picture) == ["10.1.0.1"]


def test_slice_changes_hands(picture: Picture) -> None:
    """A slice whose label names another Service touches both."""
    theirs = {"kubernetes.io/service-name": "other"}
    assert say(picture, SLICE, builders.slice(builders.entry("10.1.0.1"), labels=theirs)) == {
        WEB,
        OTHER,
    }
    assert (endpoints(picture, WEB), endpoints(picture, OTHER)) == ([], ["10.1.0.1"])


def test_slice_becomes_headless(picture: Picture) -> None:
    """A slice that gets the headless label is gone, whatever the label's value (1.1)."""
    labels = {"kubernetes.io/service-name": "web", "service.kubernetes.io/headless": ""}
    assert say(picture, SLICE, builders.slice(builders.entry("10.1.0.1"), labels=labels)) == {WEB}
    assert endpoints(picture) == []


def test_another_proxys_label_on_a_slice(picture: Picture) -> None:
    """service-proxy-name matters on a Service alone: a slice that carries it is used (1.1)."""
    labels = {
        "kubernetes.io/service-name": "web",
        "service.kubernetes.io/service-proxy-name": "another",
    }
    say(picture, SLICE, builders.slice(builders.entry("10.1.0.7"), labels=labels))
    assert endpoints(picture) == ["10.1.0.7"]


def test_removed_port(picture: Picture) -> None:
    """A port that is taken out of a Service takes only its own records along (16.3)."""
    both = [{"name": "a", "port": 80}, {"name": "b", "port": 81}]
    say(picture, WEB, builders.service(ports=both))
    say(
        picture, SLICE, builders.slice(builders.entry("10.1.0.1"), ports=[{"name": "b", "port": 9}])
    )
    kept = [(port, chosen) for port, chosen in picture.ports(WEB) if port.name.port == "b"]
    assert say(picture, WEB, builders.service(ports=both[1:])) == {WEB}
    assert list(picture.ports(WEB)) == kept


def test_zone_of_the_node(picture: Picture) -> None:
    """Another zone label touches every service, once; any other label none (3.1)."""
    assert say(picture, HERE, builders.node(labels={ZONE: "z1"})) == {WEB, OTHER}
    assert say(picture, HERE, builders.node(labels={ZONE: "z1", "other": "label"})) == set()
    assert say(picture, HERE, builders.node(labels={})) == {WEB, OTHER}


def test_deleted_node(picture: Picture) -> None:
    """A Node that is deleted is remembered as it was (13.1)."""
    say(picture, HERE, builders.node(("InternalIP", "192.0.2.1"), labels={ZONE: "z1"}))
    assert forget(picture, Kind.NODE, HERE) == set()
    picture.hear(Replaced(Kind.NODE, {}))
    assert picture.zone == "z1" and picture.node is not None and picture.primary
    assert picture.take_touched() == set()
