# SPDX-License-Identifier: Apache-2.0
"""The endpoints that each policy uses (kube-proxy.md 3).

The tables follow upstream's TestCategorizeEndpoints. Endpoints are called a, b, c; a list that a
service port does not use is empty.
"""

import pytest
from hypothesis import given

from ebpflb.model import endpoints as unused
from ebpflb.model.endpoints import Endpoint, select, uses_cluster, uses_local
from ebpflb.model.services import ServicePort
from tests.model.builders import endpoint, leaving
from tests.model.policies import (
    BOTH_LOCAL,
    CLUSTER,
    ENDPOINTS,
    EXTERNAL_LOCAL,
    EXTERNAL_LOCAL_UNREACHED,
    HERE,
    INTERNAL_LOCAL,
    INTERNAL_LOCAL_NODE_PORT,
    NODE_PORT,
)


def names(endpoints: tuple[Endpoint, ...]) -> str:
    return "".join(each.name.target for each in endpoints)


def unready(target: str, *, local: bool = False) -> Endpoint:
    return endpoint(target, ready=False, local=local)


A_HERE, B_AWAY = endpoint("a", local=True), endpoint("b")


@pytest.mark.parametrize(
    ("port", "cluster", "local"),
    [
        (CLUSTER, "ab", ""),
        (INTERNAL_LOCAL, "", "a"),
        (NODE_PORT, "ab", ""),
        (EXTERNAL_LOCAL, "ab", "a"),
        (BOTH_LOCAL, "ab", "a"),
        (INTERNAL_LOCAL_NODE_PORT, "ab", "a"),
        (EXTERNAL_LOCAL_UNREACHED, "ab", ""),
    ],
    ids=[
        "Cluster",
        "ITP Local alone uses no cluster list",
        "ETP Cluster",
        "ETP Local keeps the cluster list for the short-circuit",
        "both Local",
        "ITP Local with ETP Cluster",
        "ETP Local ignored when not externally accessible",
    ],
)
def test_lists_in_use(port: ServicePort, cluster: str, local: str) -> None:
    """The policies decide which of the two lists a service port uses; both lists are computed."""
    found = select((A_HERE, B_AWAY), HERE)
    assert (names(found.cluster), names(found.local)) == ("ab", "a")
    uses = uses_cluster(port), uses_local(port)
    assert uses == (bool(cluster), bool(local))
    assert unused.usable(port, found) == {*map(id, found.cluster * uses[0] + found.local * uses[1])}


@pytest.mark.parametrize(
    ("endpoints", "cluster"),
    [
        ([], ""),
        ([endpoint("a"), endpoint("b")], "ab"),
        ([endpoint("a"), unready("b")], "a"),
        ([unready("a"), unready("b")], ""),
        ([endpoint("a"), leaving("b")], "a"),
        ([leaving("a"), leaving("b")], "ab"),
        ([unready("a"), leaving("b")], "b"),
        ([endpoint("a", ready=False, serving=False, terminating=True)], ""),
        ([endpoint("a", ready=False, serving=True)], ""),
        ([endpoint("a", ready=True, serving=False)], "a"),
        ([endpoint("a", ready=True, serving=False, terminating=True), leaving("b")], "a"),
    ],
    ids=[
        "none",
        "all ready",
        "some ready",
        "none ready",
        "ready before terminating",
        "all terminating",
        "terminating before unready",
        "terminating but no longer serving",
        "serving but neither ready nor terminating",
        "published though not ready",
        "published though terminating",
    ],
)
def test_cluster_list(endpoints: list[Endpoint], cluster: str) -> None:
    """Ready endpoints are used, or else endpoints that are serving and terminating, or else
    none.
    """
    chosen = select(tuple(endpoints), HERE)
    assert names(chosen.cluster) == cluster
    assert chosen.has_any is bool(cluster)


@pytest.mark.parametrize(
    ("endpoints", "local"),
    [
        ([endpoint("a"), endpoint("b")], ""),
        ([endpoint("a", local=True), endpoint("b", local=True)], "ab"),
        ([endpoint("a"), endpoint("b", local=True)], "b"),
        ([unready("a", local=True), endpoint("b")], ""),
        ([leaving("a", local=True), endpoint("b", local=True)], "b"),
        ([leaving("a", local=True), leaving("b", local=True)], "ab"),
        ([leaving("a"), leaving("b")], ""),
        ([endpoint("a", ready=False, serving=False, terminating=True, local=True)], ""),
    ],
    ids=[
        "all remote",
        "all local",
        "some local",
        "local unready",
        "local ready before local terminating",
        "local terminating",
        "remote terminating",
        "local no longer serving",
    ],
)
def test_local_list(endpoints: list[Endpoint], local: str) -> None:
    """The order of preference is the same as for the cluster list, among this node's endpoints."""
    assert names(select(tuple(endpoints), HERE).local) == local


def test_fallbacks_are_independent() -> None:
    """A terminating local endpoint is used locally while the cluster list has a ready endpoint."""
    chosen = select((leaving("a", local=True), endpoint("b")), HERE)
    assert (names(chosen.cluster), names(chosen.local)) == ("b", "a")


def test_every_serving_endpoint_is_in_it() -> None:
    """The list has every serving endpoint, whatever its readiness or node (11.1)."""
    endpoints = (
        endpoint("a", zones="z2"),
        endpoint("b", ready=False, serving=True),
        leaving("c"),
        endpoint("d", ready=True, serving=False),
        unready("e", local=True),
    )
    assert names(select(endpoints, HERE).serving) == "abc"


@given(ENDPOINTS)
def test_lists_are_parts_in_order(endpoints: tuple[Endpoint, ...]) -> None:
    """Each list keeps the order of the endpoints and has only usable ones."""
    chosen = select(endpoints, HERE)
    for part in (chosen.cluster, chosen.local, chosen.serving):
        assert list(part) == [each for each in endpoints if each in part]
    for each in chosen.cluster + chosen.local:
        assert each.ready or (each.serving and each.terminating)
    assert all(each.local for each in chosen.local)


@given(ENDPOINTS)
def test_no_black_hole(endpoints: tuple[Endpoint, ...]) -> None:
    """If anyone could answer, the cluster list is not empty, whatever the hints."""
    chosen = select(endpoints, HERE)
    assert bool(chosen.cluster) is chosen.has_any
