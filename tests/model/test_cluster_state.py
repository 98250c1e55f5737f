# SPDX-License-Identifier: Apache-2.0
"""The cluster state after events (cluster_state.py)."""

from ipaddress import ip_address, ip_network

import msgspec
import pytest

from ebpflb.errors import InvalidObject
from ebpflb.lab import manifests
from ebpflb.model.addresses import Family
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Changed, Key, Kind, ReadObject, Removed, Replaced
from ebpflb.model.objects import Node, Object, ServiceCIDR
from tests.model import builders
from tests.model.builders import ports_of

WEB = Key("shop", "web")
HERE = Key("", "here")
RANGES = Key("", "kubernetes")


@pytest.fixture
def cluster() -> ClusterState:
    return ClusterState("here")


def changed(kind: Kind, key: Key, object: Object) -> Changed:
    return Changed(kind, key, ReadObject(object, "test.yaml"))


def ranges(*cidrs: str, name: str = "kubernetes") -> Changed:
    return changed(Kind.SERVICE_CIDR, Key("", name), builders.service_cidr(*cidrs))


def node(*addresses: str) -> Changed:
    listed = builders.node(*(("InternalIP", address) for address in addresses))
    assert isinstance(listed, Node)
    return changed(Kind.NODE, HERE, listed)


def test_all_but_service_cidrs_must_be_listed(cluster: ClusterState) -> None:
    """Services, slices and the node must have been listed; ServiceCIDRs need not."""
    for kind in (Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.SERVICE_CIDR):
        cluster.apply(Replaced(kind, {}))
        assert not cluster.complete
    cluster.apply(Replaced(Kind.NODE, {}))
    assert cluster.complete
    unlisted = ClusterState("here")
    for kind in (Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.NODE):
        unlisted.apply(Replaced(kind, {}))
    assert unlisted.complete and Kind.SERVICE_CIDR not in unlisted.listed


def test_service_cidrs(cluster: ClusterState) -> None:
    """The ranges are those of all ServiceCIDRs, as last received."""
    assert cluster.service_cidrs == frozenset()
    assert not cluster.apply(ranges("10.96.0.0/16", "fd00:96::/112")).warnings
    cluster.apply(ranges("10.97.0.0/16", "10.96.0.0/16", name="more"))
    assert cluster.service_cidrs == {
        ip_network("10.96.0.0/16"),
        ip_network("10.97.0.0/16"),
        ip_network("fd00:96::/112"),
    }
    cluster.apply(Removed(Kind.SERVICE_CIDR, RANGES))
    assert cluster.service_cidrs == {ip_network("10.97.0.0/16"), ip_network("10.96.0.0/16")}
    unreadable = ReadObject(InvalidObject("spec", "Expected `object`"), "test.yaml")
    cluster.apply(Replaced(Kind.SERVICE_CIDR, {Key("", "more"): unreadable}))
    assert cluster.service_cidrs == {ip_network("10.97.0.0/16"), ip_network("10.96.0.0/16")}
    cluster.apply(Replaced(Kind.SERVICE_CIDR, {}))
    assert cluster.service_cidrs == frozenset()


def test_no_spec(cluster: ClusterState) -> None:
    """A ServiceCIDR without a spec has no ranges."""
    bare = ServiceCIDR(builders.service_cidr().metadata)
    assert not cluster.apply(changed(Kind.SERVICE_CIDR, RANGES, bare)).warnings
    assert cluster.service_cidrs == frozenset()


def test_unreadable_range(cluster: ClusterState) -> None:
    """One line names the object and the field, and the whole last good state stays."""
    cluster.apply(ranges("10.96.0.0/16"))
    (warning,) = cluster.apply(ranges("10.97.0.0/16", "10.98.0.0")).warnings
    assert str(warning) == (
        'test.yaml: ServiceCIDR kubernetes: spec.cidrs[1]: "10.98.0.0" is not a CIDR such as'
        " 10.0.0.0/8 (its last good state stays in use)"
    )
    assert cluster.invalid.keys() == {(Kind.SERVICE_CIDR, RANGES)}
    assert cluster.service_cidrs == {ip_network("10.96.0.0/16")}
    cluster.apply(ranges("10.97.0.0/16"))
    assert not cluster.invalid
    assert cluster.service_cidrs == {ip_network("10.97.0.0/16")}


def test_an_object_that_was_never_valid_has_no_good_state(cluster: ClusterState) -> None:
    """For an object that was never valid the line says that it is ignored, not that an earlier
    state stays.
    """
    unreadable = ReadObject(InvalidObject("spec.ports", "no array"), "test.yaml")
    for kind in (Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.SERVICE_CIDR, Kind.NODE):
        (warning,) = cluster.apply(Changed(kind, WEB, unreadable)).warnings
        assert str(warning).endswith("spec.ports: no array (ignored: it has never been valid here)")


def test_an_undecodable_object_stays_as_it_was(cluster: ClusterState) -> None:
    """An object that cannot even be decoded is named like an invalid one, and stays as it was."""
    cluster.apply(changed(Kind.SERVICE, WEB, builders.service()))
    before = list(ports_of(cluster, WEB))
    unreadable = ReadObject(InvalidObject("spec.ports", "Expected `array | null`"), "test.yaml")
    (warning,) = cluster.apply(Changed(Kind.SERVICE, WEB, unreadable)).warnings
    assert str(warning) == (
        "test.yaml: Service shop/web: spec.ports: Expected `array | null`"
        " (its last good state stays in use)"
    )
    assert cluster.invalid == {(Kind.SERVICE, WEB): "spec.ports: Expected `array | null`"}
    assert list(ports_of(cluster, WEB)) == before
    cluster.apply(changed(Kind.SERVICE, WEB, builders.service()))
    assert not cluster.invalid


def test_invalid_and_removed(cluster: ClusterState) -> None:
    """An object that was always invalid is forgotten when a list no longer has it."""
    cluster.apply(changed(Kind.SERVICE, WEB, builders.service(clusterIP="?", clusterIPs=["?"])))
    assert cluster.invalid.keys() == {(Kind.SERVICE, WEB)}
    cluster.apply(Replaced(Kind.ENDPOINT_SLICE, {}))
    assert cluster.invalid
    cluster.apply(Replaced(Kind.SERVICE, {}))
    assert not cluster.invalid


def test_own_address(cluster: ClusterState) -> None:
    """A new address of this node changes, once, the services that it may concern."""
    service = builders.service(loadBalancerSourceRanges=["192.0.2.0/24"])
    cluster.apply(changed(Kind.SERVICE, WEB, service))
    other = builders.service(name="other")
    cluster.apply(changed(Kind.SERVICE, Key("shop", "other"), other))
    cluster.take_changed_services()
    for addresses, changed_services in (
        (["192.0.2.7", "192.0.2.8"], {WEB}),
        (["192.0.2.7"], set()),
        (["192.0.2.8", "fd00::8"], {WEB}),
    ):
        cluster.apply(node(*addresses))
        assert cluster.take_changed_services() == changed_services
    assert cluster.primary == {
        Family.IPV4: ip_address("192.0.2.8"),
        Family.IPV6: ip_address("fd00::8"),
    }


def test_another_node_is_passed_over(cluster: ClusterState) -> None:
    """If a server sends another node than the requested one, NodePorts keep their addresses."""
    cluster.apply(node("192.0.2.7"))
    other = msgspec.convert(manifests.node("there", "192.0.2.9"), Node)
    cluster.apply(changed(Kind.NODE, Key("", "there"), other))
    assert cluster.primary == {Family.IPV4: ip_address("192.0.2.7")}


def test_bind_address_overrides_the_primary_address() -> None:
    """--bind-address is the node's address of its family, which becomes the primary one
    (kube-proxy.md 17), with or without a Node.
    """
    six = ip_address("fd00::99")
    cluster = ClusterState("here", bind_address=six)
    assert cluster.primary == {Family.IPV6: six}
    cluster.apply(node("192.0.2.8", "fd00::8"))
    assert list(cluster.primary.items()) == [
        (Family.IPV6, six),
        (Family.IPV4, ip_address("192.0.2.8")),
    ]
