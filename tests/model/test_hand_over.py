# SPDX-License-Identifier: Apache-2.0
"""Which nodes get requests that are handed over, and of which Services."""

from typing import Any

import pytest
from msgspec import structs

from ebpflb.model import services
from ebpflb.model.annotations import FORWARDING_ANNOTATION
from ebpflb.model.endpoint_slices import EndpointName
from ebpflb.model.endpoints import Endpoint, Topology, UnusedReason, select
from ebpflb.model.hand_over import handed_to, keeps_here
from ebpflb.model.services import Admission, ServicePort
from tests.model import builders
from tests.model.builders import annotated

HERE, WHERE = "here", f"metadata.annotations[{FORWARDING_ANNOTATION}]"


def port(policy: str, mode: str = "keep-client", **fields: Any) -> ServicePort:
    asked = builders.service(type="LoadBalancer", externalTrafficPolicy=policy, **fields)
    return services.parse(asked, Admission(hand_over=mode)).ports[0]


def on(node: str, **fields: Any) -> Endpoint:
    made = builders.endpoint("a", local=node == HERE, **fields)
    return structs.replace(made, name=EndpointName(node, "pod"))


def nodes(of: ServicePort, *found: Endpoint, believed: str = "two three") -> Any:
    others = {(of.name.family, node) for node in believed.split()}
    return handed_to(of, select(found, Topology(HERE, "")), HERE, others)


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
@pytest.mark.parametrize("annotation", [None, "keep-client", "masquerade", "else"])
@pytest.mark.parametrize("mode", ["off", "auto", "keep-client"])
def test_whose_requests_are_handed_over(mode: str, annotation: str | None, policy: str) -> None:
    """Without the option nobody's: who asks for it by policy Cluster is told."""
    given = annotated(FORWARDING_ANNOTATION, annotation)
    asked = builders.service(type="LoadBalancer", externalTrafficPolicy=policy, annotations=given)
    found = services.parse(asked, Admission(hand_over=mode))
    keeps = (mode if annotation in (None, "else") else annotation) == "keep-client"
    assert found.ports[0].hands_over == (mode != "off" and (policy == "Local" or keeps))
    unknown = [f'{WHERE}: "else" is not one of masquerade, keep-client']
    is_in_vain = annotation == "keep-client" and (mode, policy) == ("off", "Cluster")
    vain = [f"{WHERE}: has no effect"] * is_in_vain
    wanted = unknown if annotation == "else" else vain
    assert [it.startswith(w) for it, w in zip(found.warnings, wanted, strict=True)] == [True] * len(
        wanted
    )


def test_with_policy_local_the_own_endpoints_come_first() -> None:
    local = port("Local")
    assert nodes(local, on(HERE), on("two"), on("two")) == {HERE: 1}
    assert nodes(local, on("two"), on("two"), on("three"), on("four")) == {"two": 200, "three": 100}
    assert nodes(local, on("four")) == nodes(local) == {}
    leaving = {"ready": False, "serving": True, "terminating": True}
    assert nodes(local, on(HERE, **leaving), on("two", **leaving)) == {HERE: 1}
    assert nodes(local, on(HERE, **leaving), on("two")) == {"two": 100}


def test_with_policy_cluster_all_nodes_or_none_get_their_shares() -> None:
    """So no endpoint goes without requests; a node without name is none of the believed."""
    cluster = port("Cluster")
    assert nodes(cluster, on(HERE), on("two"), on("two")) == {HERE: 100, "two": 200}
    assert nodes(cluster, on(HERE), on("two"), on("four")) == {}
    assert nodes(cluster, on(HERE), on("")) == {}
    assert nodes(cluster, on(HERE), believed="") == {HERE: 100}


def test_only_endpoints_in_use_count() -> None:
    """Ready ones that answer, else those that leave and still serve, with their weights."""
    cluster, aside = port("Cluster"), UnusedReason.SET_ASIDE
    leaving = {"ready": False, "serving": True, "terminating": True}
    found = [on("two"), on("three", ready=False), on("four", **leaving)]
    assert nodes(cluster, *found) == {"two": 100}
    assert nodes(cluster, on("two", **leaving)) == {"two": 100}
    heavy = structs.replace(on("three"), weight=300)
    assert nodes(cluster, on("two"), heavy, structs.replace(on("four"), weight=0)) == {
        "two": 100,
        "three": 300,
    }
    assert nodes(cluster, on("two"), structs.replace(on("three"), set_aside=aside)) == {"two": 100}
    assert nodes(cluster, structs.replace(on("two"), set_aside=aside)) == {"two": 100}


def test_sctp_is_not_handed_over() -> None:
    sctp = port("Local", ports=[{"port": 80, "protocol": "SCTP"}])
    assert nodes(sctp, on("two")) is None


def test_who_keeps_requests_in_spite_of_policy_cluster() -> None:
    """A node with endpoints, while the shares are in force."""
    cluster, local = port("Cluster"), port("Local")
    assert keeps_here(cluster, {HERE: 1, "two": 1}, HERE)
    assert not keeps_here(cluster, {"two": 1}, HERE)
    assert not keeps_here(cluster, {}, HERE)
    assert not keeps_here(cluster, None, HERE)
    assert not keeps_here(local, {HERE: 1}, HERE)
