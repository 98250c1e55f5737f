# SPDX-License-Identifier: Apache-2.0
"""The answers of health-check node ports (kube-proxy.md 10)."""

from ipaddress import ip_address
from typing import Any

import pytest
from msgspec.structs import replace

from ebpflb.model import annotations, devices, objects
from ebpflb.model.addresses import Family
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoints import HealthCheck, LocalEndpoints
from ebpflb.model.events import Changed, Key, Kind, ReadObject
from tests.model import builders
from tests.model.builders import entry, ports_of

HERE, PORT = "here", 32000
V4, V6 = Family.IPV4, Family.IPV6
LOCAL = {"nodeName": HERE}


def balanced(**spec: Any) -> objects.Service:
    """Return a load balancer's Service that needs to know which nodes have endpoints."""
    asked: dict[str, Any] = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": PORT,
        "ports": [{"port": 80, "nodePort": 30080}],
    }
    return builders.service(**(asked | spec))


def health_check(service: objects.Service, *slices: objects.EndpointSlice) -> HealthCheck | None:
    """Return the answer; it must not depend on the order of the objects."""
    cluster, local = ClusterState(HERE), LocalEndpoints()
    for slice in slices:
        key = Key("shop", slice.metadata.name)
        cluster.apply(Changed(Kind.ENDPOINT_SLICE, key, ReadObject(slice, "test")))
    cluster.apply(Changed(Kind.SERVICE, Key("shop", "web"), ReadObject(service, "test")))
    for port, selection in ports_of(cluster, Key("shop", "web")):
        local.add(port, selection)
    return local.health_check


def count(*slices: objects.EndpointSlice, **spec: Any) -> int:
    found = health_check(balanced(**spec), *slices)
    assert found is not None
    return found.local_endpoints[V4]


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "NodePort"},
        {"type": "ClusterIP", "externalIPs": ["192.0.2.1"]},
        {"externalTrafficPolicy": "Cluster"},
        {"externalTrafficPolicy": None},
        {"healthCheckNodePort": 0},
        {"type": "ExternalName"},
        {"clusterIP": "None"},
    ],
)
def test_only_load_balancer_with_policy_local_and_a_port(spec: dict[str, Any]) -> None:
    """Each of the three conditions is needed."""
    assert health_check(balanced(**spec)) is None


def test_runs_whether_or_not_there_are_endpoints() -> None:
    """Without a slice the port exists, and its count is 0."""
    assert health_check(balanced()) == HealthCheck(PORT, {V4: 0})


def test_endpoints_of_weight_0_do_not_count() -> None:
    """Endpoints of weight 0 do not count: they get no new connections."""
    slice = builders.slice(entry("10.1.0.1", **LOCAL))
    weights = {annotations.WEIGHT_ANNOTATION: "0"}
    drained = replace(slice, metadata=replace(slice.metadata, annotations=weights))
    assert (count(slice), count(drained)) == (1, 0)


def test_counts_local_endpoints_only() -> None:
    """Endpoints on other nodes, or on no node, do not count."""
    slice = builders.slice(
        entry("10.1.0.1", **LOCAL), entry("10.1.0.2", nodeName="there"), entry("10.1.0.3")
    )
    assert count(slice) == 1


@pytest.mark.parametrize(
    ("conditions", "counts"),
    [
        ({}, 1),
        ({"ready": True}, 1),
        ({"ready": True, "serving": False}, 1),
        ({"ready": True, "serving": True, "terminating": True}, 1),
        ({"ready": False}, 0),
        ({"ready": False, "serving": True}, 0),
        ({"ready": False, "serving": True, "terminating": True}, 0),
        ({"ready": False, "serving": False, "terminating": True}, 0),
    ],
)
def test_terminating_endpoints_never_count_even_while_used(
    conditions: dict[str, bool], counts: int
) -> None:
    """Only ready endpoints count; the fallback to terminating ones is for traffic."""
    slice = builders.slice(entry("10.1.0.1", conditions=conditions, **LOCAL))
    assert count(slice) == counts


def test_one_ip_with_two_ports_counts_once() -> None:
    """Distinct IPs are counted, over all ports of the Service."""
    ports = [{"name": "a", "port": 8080}, {"name": "b", "port": 8443}]
    slice = builders.slice(entry("10.1.0.1", **LOCAL), ports=ports)
    assert count(slice, ports=[{"name": "a", "port": 80}, {"name": "b", "port": 443}]) == 1


ADDRESSES = [ip_address(it) for it in ("127.0.0.1", "10.0.0.7", "192.0.2.7", "::1", "fd00::7")]
PRIMARY = {V4: ADDRESSES[1], V6: ADDRESSES[4]}


def listening(*choice: str, primary: dict[Family, Any] = PRIMARY) -> dict[Family, list[str]]:
    found = devices.health_check_addresses(ADDRESSES, choice, primary)
    return {family: sorted(map(str, chosen)) for family, chosen in found.items()}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ((), {}),
        (("0.0.0.0/0",), {}),
        (("0.0.0.0/0", "10.0.0.0/8", "::/0"), {}),
        (("primary",), {V4: ["10.0.0.7"], V6: ["fd00::7"]}),
        (("10.0.0.0/8",), {V4: ["10.0.0.7"]}),
        (("fd00::/8", "::/0"), {}),
        (("10.0.0.0/8", "192.0.2.0/24"), {V4: ["10.0.0.7", "192.0.2.7"]}),
        (("127.0.0.0/8",), {V4: ["127.0.0.1"]}),
        (("203.0.113.0/24",), {V4: []}),
        (("primary", "localhost"), {V4: ["10.0.0.7", "127.0.0.1"], V6: ["::1", "fd00::7"]}),
        (("all",), {}),
    ],
)
def test_listens_only_on_matching_addresses_unless_match_all(
    choice: tuple[str, ...], expected: dict[Family, list[str]]
) -> None:
    """The port listens on each family's matching addresses.

    Without a setting, or with /0, all addresses match; loopback only if it is named.
    """
    assert listening(*choice) == expected
