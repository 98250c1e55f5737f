# SPDX-License-Identifier: Apache-2.0
"""The service ports that count as without a local endpoint (kube-proxy.md 14, last line)."""

from typing import Any

import pytest

from ebpflb.model.addresses import Family
from ebpflb.model.endpoints import (
    Endpoint,
    NoLocalEndpoints,
    Topology,
    TrafficPolicy,
    policies_without_endpoints,
    select,
)
from tests.model import builders
from tests.model.builders import endpoint, leaving

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
    """Each policy that is Local counts, and no other; endpoints that leave are endpoints."""
    assert policies((endpoint("a"),), **spec) == expected
    assert policies((leaving("a"),), **spec) == expected


@pytest.mark.parametrize("spec", [LOCAL_INSIDE, LOCAL_OUTSIDE, LOCAL_BOTH])
def test_an_endpoint_here(spec: dict[str, Any]) -> None:
    """With an endpoint on this node nothing counts, even if it is terminating."""
    assert policies((endpoint("a"), endpoint("b", local=True)), **spec) == NONE
    assert policies((endpoint("a"), leaving("b", local=True)), **spec) == NONE


@pytest.mark.parametrize("endpoints", [(), (endpoint("a", ready=False),)])
def test_both_local_and_no_endpoints_at_all_gives_0_0(endpoints: tuple[Endpoint, ...]) -> None:
    """No endpoint anywhere is a refusal, not a drop: it does not count."""
    assert policies(endpoints, **LOCAL_BOTH) == NONE


def test_counts_follow_the_service_ports() -> None:
    """Each counts in its family and policies as it was last set, and not at all once it is gone."""
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
