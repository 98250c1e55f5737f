# SPDX-License-Identifier: Apache-2.0
"""The services that an event changes (kube-proxy.md 2, 16.3): only changed ones cause work."""

from ipaddress import IPv4Address

import pytest

from ebpflb.model.addresses import Family
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoints import Selection
from ebpflb.model.events import Changed, Key, Kind, ReadObject, Removed, Replaced
from ebpflb.model.facts import Fact
from ebpflb.model.nodes import Condition, Destination
from ebpflb.model.objects import Object
from ebpflb.model.services import PortName, Protocol
from tests.model import builders
from tests.model.builders import ports_of

WEB, OTHER = Key("shop", "web"), Key("shop", "other")
SLICE, SECOND = Key("shop", "web-abcde"), Key("shop", "web-fghij")
HERE = Key("", "here")
ZONE = "topology.kubernetes.io/zone"


@pytest.fixture
def cluster() -> ClusterState:
    """Return a state with two services, and a slice of the first one."""
    found = ClusterState("here")
    say(found, WEB, builders.service())
    say(found, OTHER, builders.service(name="other", clusterIPs=["172.30.0.42"]))
    say(found, SLICE, builders.slice(builders.entry("10.1.0.1")))
    found.take_changed_services()
    return found


def say(cluster: ClusterState, key: Key, object: Object) -> set[Key]:
    """Apply a change of an object; return the changed services."""
    kind = Kind(type(object).__name__)
    assert not cluster.apply(Changed(kind, key, ReadObject(object, "test.yaml"))).warnings
    return cluster.take_changed_services()


def forget(cluster: ClusterState, kind: Kind, key: Key) -> set[Key]:
    cluster.apply(Removed(kind, key))
    return cluster.take_changed_services()


def endpoints(cluster: ClusterState, service: Key = WEB) -> list[str]:
    """Return the addresses of the cluster lists of all ports."""
    found: list[Selection] = [selection for _, selection in ports_of(cluster, service)]
    return [str(each.address) for selection in found for each in selection.cluster]


def test_equal_service(cluster: ClusterState) -> None:
    """An unused change, such as of a label or the status, changes nothing (16.3)."""
    for service in (
        builders.service(),
        builders.service(labels={"app": "web"}),
        builders.service(ingress=[{"hostname": "lb.example.org"}]),
    ):
        assert say(cluster, WEB, service) == set()


def test_change_taken_back(cluster: ClusterState) -> None:
    """A reverted change leaves the same ports and endpoints as before."""
    before = list(ports_of(cluster, WEB))
    assert say(cluster, WEB, builders.service(ports=[{"port": 81}])) == {WEB}
    assert list(ports_of(cluster, WEB)) != before
    say(cluster, WEB, builders.service())
    assert list(ports_of(cluster, WEB)) == before


def test_equal_slice(cluster: ClusterState) -> None:
    """A slice that equals the known one is no change (2)."""
    assert say(cluster, SLICE, builders.slice(builders.entry("10.1.0.1"))) == set()
    assert say(cluster, SLICE, builders.slice(builders.entry("10.1.0.2"))) == {WEB}


def test_unknown_slice_removed(cluster: ClusterState) -> None:
    """Removing an unknown slice or service is no change (2)."""
    assert forget(cluster, Kind.ENDPOINT_SLICE, SECOND) == set()
    assert forget(cluster, Kind.SERVICE, Key("shop", "nobody")) == set()


def test_slice_before_its_service() -> None:
    """A slice may come before its Service: it is kept, and has no effect until then (2)."""
    cluster = ClusterState("here")
    say(cluster, SLICE, builders.slice(builders.entry("10.1.0.1")))
    assert endpoints(cluster) == []
    assert say(cluster, WEB, builders.service()) == {WEB}
    assert endpoints(cluster) == ["10.1.0.1"]


def test_slice_outlives_its_service(cluster: ClusterState) -> None:
    """A slice may outlive its Service: when the Service comes back it has these endpoints (2)."""
    assert forget(cluster, Kind.SERVICE, WEB) == {WEB}
    assert endpoints(cluster) == []
    assert say(cluster, WEB, builders.service()) == {WEB}
    assert endpoints(cluster) == ["10.1.0.1"]


def test_one_slice_of_two_goes(cluster: ClusterState) -> None:
    """Deleting one slice removes only its own endpoints (2)."""
    both = builders.entry("10.1.0.1"), builders.entry("10.1.0.2")
    assert say(cluster, SECOND, builders.slice(*both, name=SECOND.name)) == {WEB}
    assert endpoints(cluster) == ["10.1.0.1", "10.1.0.2"]
    assert forget(cluster, Kind.ENDPOINT_SLICE, SECOND) == {WEB}
    assert endpoints(cluster) == ["10.1.0.1"]


def test_slice_changes_hands(cluster: ClusterState) -> None:
    """A slice whose label names another Service changes both."""
    theirs = {"kubernetes.io/service-name": "other"}
    assert say(cluster, SLICE, builders.slice(builders.entry("10.1.0.1"), labels=theirs)) == {
        WEB,
        OTHER,
    }
    assert (endpoints(cluster, WEB), endpoints(cluster, OTHER)) == ([], ["10.1.0.1"])


def test_slice_becomes_headless(cluster: ClusterState) -> None:
    """A slice that gets the headless label is removed, whatever the label's value (1.1)."""
    labels = {"kubernetes.io/service-name": "web", "service.kubernetes.io/headless": ""}
    assert say(cluster, SLICE, builders.slice(builders.entry("10.1.0.1"), labels=labels)) == {WEB}
    assert endpoints(cluster) == []


def test_another_proxys_label_on_a_slice(cluster: ClusterState) -> None:
    """service-proxy-name matters on a Service only: a slice with this label is used (1.1)."""
    labels = {
        "kubernetes.io/service-name": "web",
        "service.kubernetes.io/service-proxy-name": "another",
    }
    say(cluster, SLICE, builders.slice(builders.entry("10.1.0.7"), labels=labels))
    assert endpoints(cluster) == ["10.1.0.7"]


def test_removed_port(cluster: ClusterState) -> None:
    """A port that is removed from a Service loses only its own records (16.3)."""
    both = [{"name": "a", "port": 80}, {"name": "b", "port": 81}]
    say(cluster, WEB, builders.service(ports=both))
    say(
        cluster, SLICE, builders.slice(builders.entry("10.1.0.1"), ports=[{"name": "b", "port": 9}])
    )
    kept = [(port, chosen) for port, chosen in ports_of(cluster, WEB) if port.name.port == "b"]
    assert say(cluster, WEB, builders.service(ports=both[1:])) == {WEB}
    assert list(ports_of(cluster, WEB)) == kept


def test_zone_of_the_node(cluster: ClusterState) -> None:
    """A new zone label changes every service, once; other labels change none (3.1)."""
    assert say(cluster, HERE, builders.node(labels={ZONE: "z1"})) == {WEB, OTHER}
    assert say(cluster, HERE, builders.node(labels={ZONE: "z1", "other": "label"})) == set()
    assert say(cluster, HERE, builders.node(labels={})) == {WEB, OTHER}


def test_deleted_node(cluster: ClusterState) -> None:
    """A deleted Node is remembered as it was (13.1)."""
    say(cluster, HERE, builders.node(("InternalIP", "192.0.2.1"), labels={ZONE: "z1"}))
    assert forget(cluster, Kind.NODE, HERE) == set()
    cluster.apply(Replaced(Kind.NODE, {}))
    assert cluster.zone == "z1" and cluster.node is not None and cluster.primary
    assert cluster.take_changed_services() == set()


def test_rules_in_raw_change_the_services_with_such_a_frontend(cluster: ClusterState) -> None:
    """Only claimed frontends are compared with the rules, because a Service may ask for many more.
    Unchanged rules change nothing.
    """
    port = Condition(of_address=False, ranges=((80, 80),), negated=False)
    rules = frozenset({Destination(frozenset({Protocol.TCP}), (port,))})
    web = PortName("shop", "web", "", Protocol.TCP, Family.IPV4)
    other = web._replace(service="other")
    address = IPv4Address("172.30.0.41")
    claimed = [((address, 80, 6), [web]), ((address, 81, 6), [other]), ((address, 80, 17), [other])]
    cluster.claimed = lambda: claimed
    for _ in range(2):
        assert cluster.observe(Fact.UNTRACKED_DESTINATIONS, rules)
        assert cluster.take_changed_services() == {WEB}
        assert not cluster.observe(Fact.UNTRACKED_DESTINATIONS, rules)
        assert cluster.take_changed_services() == set()
        assert cluster.observe(Fact.UNTRACKED_DESTINATIONS, frozenset())
        assert cluster.take_changed_services() == {WEB}
