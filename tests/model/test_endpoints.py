# SPDX-License-Identifier: Apache-2.0
"""The slices of a Service become the endpoints of a service port (kube-proxy.md 2)."""

from collections.abc import Iterable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.model import endpoint_slices, endpoints, objects
from ebpflb.model.addresses import FAMILIES, Family
from ebpflb.model.endpoints import (
    Endpoint,
    NoLocalEndpoints,
    Topology,
    TrafficPolicy,
    policies_without_endpoints,
    select,
)
from ebpflb.model.services import PortName, Protocol
from tests.model import builders
from tests.model.builders import endpoint, entry, leaving, stored

HERE = "node-here"

Slices = list[objects.EndpointSlice]
Found = tuple[Endpoint, ...]


def merged(*slices: objects.EndpointSlice, port: str = "") -> tuple[Endpoint, ...]:
    return merge(slices, builders.port_name(port))


def merge(slices: Iterable[objects.EndpointSlice], name: PortName, node: str = HERE) -> Found:
    return endpoints.merge([stored(each) for each in slices], name, node)


def texts(found: tuple[Endpoint, ...]) -> list[str]:
    return [f"{endpoint.address}:{endpoint.port}" for endpoint in found]


def test_all_slices_of_a_service_count() -> None:
    """All slices of a service count, whoever wrote them."""
    first = builders.slice(entry("10.1.0.1"), entry("10.1.0.2"), name="a")
    second = builders.slice(entry("10.1.0.3"), name="b")
    assert texts(merged(first, second)) == ["10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080"]


def test_same_name_and_protocol() -> None:
    """A service port uses slice ports with its own name and protocol, whatever their number."""
    ports = [
        {"name": "http", "port": 80},
        {"name": "http", "port": 81, "protocol": "UDP"},
        {"name": "other", "port": 82},
    ]
    one = builders.slice(entry("10.1.0.1"), ports=ports, name="a")
    two = builders.slice(entry("10.1.0.2"), ports=[{"name": "http", "port": 8000}], name="b")
    assert texts(merged(one, two, port="http")) == ["10.1.0.1:80", "10.1.0.2:8000"]
    udp = builders.port_name("http", Protocol.UDP)
    assert texts(merge([one, two], udp)) == ["10.1.0.1:81"]


def test_each_family_sees_its_own_slices() -> None:
    """Each family sees the slices of its own address type."""
    four = builders.slice(entry("10.1.0.1"), name="a")
    six = builders.slice(entry("fd00::1"), name="b", family="IPv6")
    fqdn = builders.slice(entry("10.1.0.9"), name="c", family="FQDN")
    name = builders.port_name(family=Family.IPV6)
    assert texts(merged(four, six, fqdn)) == ["10.1.0.1:8080"]
    assert texts(merge([four, six, fqdn], name)) == ["fd00::1:8080"]


@pytest.mark.parametrize(
    ("port", "found"),
    [
        ({"name": None, "port": 80}, []),
        ({"port": None}, []),
        ({"port": 0}, []),
        ({"port": 80}, ["10.1.0.1:80"]),
        ({"port": 80, "protocol": None}, ["10.1.0.1:80"]),
    ],
    ids=["no name", "no number", "zero", "defaults", "null protocol"],
)
def test_slice_ports(port: dict[str, Any], found: list[str]) -> None:
    """A port without name or number is skipped; "" and TCP are the defaults."""
    assert texts(merged(builders.slice(entry("10.1.0.1"), ports=[port]))) == found


def test_only_the_first_address() -> None:
    """Further addresses are ignored, and an endpoint without any address is skipped."""
    slice = builders.slice(entry("10.1.0.1", "10.1.0.2"), entry())
    assert texts(merged(slice)) == ["10.1.0.1:8080"]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (None, (True, True, False)),
        ({}, (True, True, False)),
        ({"ready": None, "serving": None, "terminating": None}, (True, True, False)),
        ({"ready": False}, (False, True, False)),
        ({"ready": False, "serving": False}, (False, False, False)),
        ({"ready": False, "serving": True, "terminating": True}, (False, True, True)),
        ({"ready": True, "serving": False, "terminating": True}, (True, False, True)),
    ],
)
def test_missing_conditions_have_defaults(
    conditions: dict[str, Any] | None, expected: tuple[bool, ...]
) -> None:
    """A missing condition means ready, serving and not terminating, each independently."""
    (found,) = merged(builders.slice(entry("10.1.0.1", conditions=conditions)))
    assert (found.ready, found.serving, found.terminating) == expected


@pytest.mark.parametrize(
    ("node", "local"), [(HERE, True), ("elsewhere", False), ("", False), (None, False)]
)
def test_an_endpoint_of_this_node_is_local(node: str | None, local: bool) -> None:
    """An endpoint is local if its nodeName is the name of this node."""
    slice = builders.slice(entry("10.1.0.1", nodeName=node))
    assert [found.local for found in merged(slice)] == [local]
    (nowhere,) = merge([slice], builders.port_name(), "")
    assert not nowhere.local


def test_hints_and_target() -> None:
    """Zone hints, node hints and the pod's name are kept."""
    hints = {"forZones": [{"name": "z1"}, {"name": "z2"}], "forNodes": [{"name": HERE}]}
    slice = builders.slice(
        entry("10.1.0.1", hints=hints, targetRef={"kind": "Pod", "name": "web-1"}),
        entry("10.1.0.2", hints={"forZones": None}),
    )
    hinted, plain = merged(slice)
    assert hinted.hints.zones == frozenset({"z1", "z2"})
    assert hinted.hints.nodes == frozenset({HERE})
    assert (hinted.name.target, plain.name.target) == ("web-1", "")
    assert plain.hints.zones == plain.hints.nodes == frozenset()


GOING = {"ready": False, "serving": True, "terminating": True}
GONE = {"ready": False, "serving": False, "terminating": True}
UNREADY = {"ready": False, "serving": False}


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        ({}, GOING, "a"),
        (GOING, {}, "b"),
        (GOING, GONE, "a"),
        (UNREADY, {}, "b"),
        ({}, UNREADY, "b"),
    ],
    ids=["stays", "comes back", "both go", "last copy", "last copy, unready"],
)
def test_a_later_copy_of_an_endpoint_counts(
    first: dict[str, bool], second: dict[str, bool], winner: str
) -> None:
    """A later copy replaces an earlier one unless it terminates; slices are ordered by name."""
    a = builders.slice(entry("10.1.0.1", conditions=first, targetRef={"name": "a"}), name="a")
    b = builders.slice(entry("10.1.0.1", conditions=second, targetRef={"name": "b"}), name="b")
    assert [found.name.target for found in merged(a, b)] == [winner]
    assert merged(b, a) == merged(a, b)


def test_removed_slice() -> None:
    """An endpoint in two slices stays until both are gone."""
    a = builders.slice(entry("10.1.0.1"), entry("10.1.0.2"), name="a")
    b = builders.slice(entry("10.1.0.2"), entry("10.1.0.3"), name="b")
    assert texts(merged(b)) == ["10.1.0.2:8080", "10.1.0.3:8080"]
    assert texts(merged(a)) == ["10.1.0.1:8080", "10.1.0.2:8080"]


@pytest.mark.parametrize(
    ("family", "ordered"),
    [
        ("IPv4", ["10.1.0.10", "10.1.0.1", "10.1.0.2", "9.0.0.1"]),
        ("IPv6", ["fd00::10", "fd00::1:9", "fd00::1"]),
    ],
)
def test_order_is_that_of_the_text(family: str, ordered: list[str]) -> None:
    """The order is that of "ip:port" as text, with brackets around IPv6."""
    slice = builders.slice(*map(entry, reversed(ordered)), family=family)
    name = builders.port_name(family=FAMILIES[family])
    assert [str(found.address) for found in merge([slice], name)] == ordered


A_FEW_ADDRESSES = some.sampled_from([f"10.1.0.{last}" for last in (1, 2, 10, 20)] + ["x"])
CONDITIONS = some.fixed_dictionaries(
    {flag: some.booleans() for flag in ("ready", "serving", "terminating")}
)
ENTRIES = some.lists(some.builds(entry, A_FEW_ADDRESSES, conditions=CONDITIONS), max_size=5)
SLICES = some.lists(ENTRIES, max_size=4).map(
    lambda each: [builders.slice(*part, name=f"web-{n}") for n, part in enumerate(each)]
)


@given(SLICES, some.randoms(use_true_random=False))
def test_order_of_arrival_does_not_matter(slices: Slices, random: Random) -> None:
    """The same slices give the same endpoints, in whatever order they came."""
    shuffled = random.sample(slices, len(slices))
    assert merged(*shuffled) == merged(*slices)


@given(SLICES)
def test_each_endpoint_once(slices: Slices) -> None:
    """No address and port appears twice, and a copy that is not terminating is preferred."""
    found = merged(*slices)
    assert len(set(texts(found))) == len(found)
    staying = {
        each["addresses"][0]
        for slice in slices
        for each in msgspec.to_builtins(slice.endpoints)
        if not each["conditions"]["terminating"]
    }
    assert {str(each.address) for each in found if not each.terminating} == staying - {"x"}


@given(SLICES)
def test_what_is_skipped_is_remarked_upon(slices: Slices) -> None:
    """Every entry of a slice is either merged or has a warning."""
    for slice in slices:
        listed = [each.addresses[0] for each in slice.endpoints or () if each.addresses]
        assert len(endpoint_slices.read(slice)[1]) == listed.count("x")
        assert {str(each.address) for each in merged(slice)} == set(listed) - {"x"}


# The service ports that count as without a local endpoint (kube-proxy.md 14, last line).

NONE: set[TrafficPolicy] = set()
INTERNAL, EXTERNAL = {TrafficPolicy.INTERNAL}, {TrafficPolicy.EXTERNAL}
LOCAL_INSIDE = {"internalTrafficPolicy": "Local"}
LOCAL_OUTSIDE = {
    "type": "NodePort",
    "externalTrafficPolicy": "Local",
    "ports": [{"port": 80, "nodePort": 30080}],
}
LOCAL_BOTH = LOCAL_INSIDE | LOCAL_OUTSIDE
LOCAL_UNREACHED = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}


def policies(endpoints: tuple[Endpoint, ...], **spec: Any) -> set[TrafficPolicy]:
    port = builders.only_port(builders.service(**spec))
    return set(policies_without_endpoints(port, select(endpoints, Topology("here", ""))))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, NONE),
        (LOCAL_INSIDE, INTERNAL),
        (LOCAL_OUTSIDE, EXTERNAL),
        (LOCAL_BOTH, INTERNAL | EXTERNAL),
        (LOCAL_UNREACHED, NONE),
    ],
)
def test_endpoints_elsewhere_only(spec: dict[str, Any], expected: set[TrafficPolicy]) -> None:
    """Each policy Local counts, and no other policy; terminating endpoints count as endpoints."""
    assert policies((endpoint("a"),), **spec) == expected
    assert policies((leaving("a"),), **spec) == expected


@pytest.mark.parametrize("spec", [LOCAL_INSIDE, LOCAL_OUTSIDE, LOCAL_BOTH])
def test_an_endpoint_here(spec: dict[str, Any]) -> None:
    """With an endpoint on this node no port counts, even if the endpoint is terminating."""
    assert policies((endpoint("a"), endpoint("b", local=True)), **spec) == NONE
    assert policies((endpoint("a"), leaving("b", local=True)), **spec) == NONE


@pytest.mark.parametrize("endpoints", [(), (endpoint("a", ready=False),)])
def test_both_local_and_no_endpoints_at_all_gives_0_0(endpoints: tuple[Endpoint, ...]) -> None:
    """Without any endpoint a service refuses instead of dropping, and is not counted."""
    assert policies(endpoints, **LOCAL_BOTH) == NONE


def test_counts_follow_the_service_ports() -> None:
    """A port counts in its family and current policies, and no longer after its deletion."""
    tally = NoLocalEndpoints()
    v4, v6 = builders.port_name(), builders.port_name(family=Family.IPV6)
    tally.update(v4, frozenset(TrafficPolicy))
    tally.update(v6, frozenset({TrafficPolicy.EXTERNAL}))
    tally.update(builders.port_name("metrics"), frozenset({TrafficPolicy.EXTERNAL}))
    assert tally.counts == {
        TrafficPolicy.INTERNAL: {Family.IPV4: 1, Family.IPV6: 0},
        TrafficPolicy.EXTERNAL: {Family.IPV4: 2, Family.IPV6: 1},
    }
    tally.update(v4, frozenset({TrafficPolicy.INTERNAL}))
    tally.update(v6, frozenset())
    tally.update(v6, frozenset())
    assert tally.counts == {
        TrafficPolicy.INTERNAL: {Family.IPV4: 1, Family.IPV6: 0},
        TrafficPolicy.EXTERNAL: {Family.IPV4: 1, Family.IPV6: 0},
    }
