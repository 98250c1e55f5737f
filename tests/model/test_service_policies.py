# SPDX-License-Identifier: Apache-2.0
"""Policies, affinity and health checks of a Service, and its invalid fields."""

from typing import Any

import pytest

from ebpflb import errors
from ebpflb.model import services
from tests.model import builders


@pytest.mark.parametrize(
    ("spec", "local"),
    [
        ({"type": "LoadBalancer"}, True),
        ({"type": "NodePort"}, True),
        ({"type": "ClusterIP"}, False),
        ({"type": "ClusterIP", "externalIPs": ["192.0.2.1"]}, True),
        ({"type": "ClusterIP", "externalIPs": ["2001:db8::1"]}, True),
    ],
    ids=["LoadBalancer", "NodePort", "ClusterIP", "externalIP", "externalIP of other family"],
)
def test_external_policy(spec: dict[str, Any], local: bool) -> None:
    """Local counts only for a Service that is external by its spec (1.4)."""
    port = builders.only_port(builders.service(externalTrafficPolicy="Local", **spec))
    assert port.external_local is local
    other = builders.only_port(builders.service(externalTrafficPolicy="Cluster", **spec))
    assert not other.external_local


@pytest.mark.parametrize(("policy", "local"), [(None, False), ("Cluster", False), ("Local", True)])
def test_internal_policy(policy: str | None, local: bool) -> None:
    """A missing policy means Cluster (1.4)."""
    port = builders.only_port(builders.service(internalTrafficPolicy=policy))
    assert port.internal_local is local


@pytest.mark.parametrize(
    ("spec", "accessible"),
    [
        ({}, False),
        ({"ports": [{"port": 80, "nodePort": 30080}]}, True),
        ({"externalIPs": ["192.0.2.1"]}, True),
        ({"ingress": [{"ip": "198.51.100.1"}]}, True),
        ({"externalIPs": ["2001:db8::1"]}, False),
    ],
    ids=["cluster IP only", "node port", "external IP", "load balancer", "in the other family"],
)
def test_externally_accessible(spec: dict[str, Any], accessible: bool) -> None:
    """A port is accessible from outside by a node port, load balancer or external IP of its own
    family (3).
    """
    port = builders.only_port(builders.service(**spec))
    assert port.externally_accessible is accessible


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ({}, 0),
        ({"sessionAffinity": "ClientIP"}, 10800),
        ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {}}, 10800),
        (
            {
                "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86400}},
            },
            86400,
        ),
        (
            {
                "sessionAffinity": "None",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}},
            },
            0,
        ),
    ],
    ids=["unsaid", "default", "empty", "a day", "None"],
)
def test_the_timeout_defaults_to_three_hours(spec: dict[str, Any], seconds: int) -> None:
    """The timeout is used only for ClientIP and defaults to three hours (1.4)."""
    assert builders.only_port(builders.service(**spec)).affinity_seconds == seconds


def test_a_port_name_is_used_once_per_protocol() -> None:
    """One port name may be used once for each of the three protocols."""
    listed = ["TCP", "UDP", "SCTP"]
    ports = [{"port": 53, "protocol": protocol} for protocol in listed]
    found = services.parse(builders.service(ports=ports)).ports
    assert [port.name.protocol.name for port in found] == listed


def _affinity(seconds: int) -> dict[str, Any]:
    return {
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}},
    }


def _health_check(port: int) -> dict[str, Any]:
    return {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": port}


TIMEOUT = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"name": ""}, "metadata.name", "is empty"),
    ({"namespace": ""}, "metadata.namespace", "is empty"),
    ({"type": "Cluster"}, "spec.type", '"Cluster" is not one of ClusterIP, '),
    ({"clusterIPs": ["fd00::1"]}, "spec.clusterIPs[0]", '"fd00::1" is not an IPv4 address'),
    ({"clusterIPs": ["x"]}, "spec.clusterIPs[0]", '"x" is not an IP address'),
    ({"ipFamilies": None, "clusterIP": "x"}, "spec.clusterIP", '"x" is not an IP address'),
    ({"ipFamilies": ["IPv5"]}, "spec.ipFamilies[0]", '"IPv5" is not one of IPv4, IPv6'),
    ({"ports": [{"port": 0}]}, "spec.ports[0].port", "0 is not in 1..65535"),
    ({"ports": [{"port": 65536}]}, "spec.ports[0].port", "65536 is not in 1..65535"),
    ({"ports": [{"port": 1, "nodePort": -1}]}, "spec.ports[0].nodePort", "-1 is not in"),
    ({"ports": [{"port": 1, "nodePort": 65536}]}, "spec.ports[0].nodePort", "65536 is not in"),
    (
        {"ports": [{"port": 1, "protocol": "tcp"}]},
        "spec.ports[0].protocol",
        '"tcp" is not one of TCP, UDP, SCTP',
    ),
    ({"ports": [{"port": 1}, {"port": 2}]}, "spec.ports[1].name", 'a second TCP port ""'),
    ({"sessionAffinity": "Cookie"}, "spec.sessionAffinity", '"Cookie" is not one of'),
    (_affinity(0), TIMEOUT, "0 is not in 1..86400"),
    (_affinity(86401), TIMEOUT, "86401 is not in 1..86400"),
    (
        {"internalTrafficPolicy": ""},
        "spec.internalTrafficPolicy",
        '"" is not one of Cluster, Local',
    ),
    ({"externalTrafficPolicy": "local"}, "spec.externalTrafficPolicy", '"local" is not one of'),
    (_health_check(65536), "spec.healthCheckNodePort", "65536 is not in 1..65535"),
]


@pytest.mark.parametrize(("spec", "field", "reason"), INVALID)
def test_an_invalid_field_is_named(spec: dict[str, Any], field: str, reason: str) -> None:
    """A field that no API server would have accepted is named with its path."""
    with pytest.raises(errors.InvalidObject) as refusal:
        services.parse(builders.service(**spec))
    assert refusal.value.field == field
    assert refusal.value.reason.startswith(reason)
