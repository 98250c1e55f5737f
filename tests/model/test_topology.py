# SPDX-License-Identifier: Apache-2.0
"""How topology hints narrow the cluster list (kube-proxy.md 3.1)."""

import msgspec
import pytest

from ebpflb.model.endpoint_slices import Hints
from ebpflb.model.endpoints import Endpoint, Topology, select
from tests.model.builders import endpoint, leaving

HERE = Topology(node="node-1", zone="z1")


def cluster(*endpoints: Endpoint, topology: Topology = HERE) -> str:
    chosen = select(endpoints, topology)
    return "".join(each.name.target for each in chosen.cluster)


def unready(target: str, zones: str = "") -> Endpoint:
    return endpoint(target, ready=False, zones=zones)


@pytest.mark.parametrize(
    ("endpoints", "kept"),
    [
        ([endpoint("a", zones="z1"), endpoint("b", zones="z2")], "a"),
        ([endpoint("a", zones="z2"), endpoint("b", zones="z3")], "ab"),
        ([endpoint("a", zones="z1"), endpoint("b")], "ab"),
        ([endpoint("a"), endpoint("b")], "ab"),
        ([endpoint("a", zones="z1"), endpoint("b", zones="z2"), unready("c")], "a"),
        ([endpoint("a", zones="z2"), unready("b", "z1")], "a"),
        (
            [endpoint("a", zones="z1 z2"), endpoint("b", zones="z2"), endpoint("c", zones="z3 z1")],
            "ac",
        ),
        ([leaving("a", zones="z1"), leaving("b", zones="z2")], "ab"),
        ([leaving("a", zones="z1"), endpoint("b", zones="z2")], "b"),
    ],
    ids=[
        "all hinted",
        "none for this zone",
        "one without a hint",
        "none hinted",
        "an unready one needs no hint",
        "an unready one for this zone does not count",
        "several zones each",
        "terminating ones are not narrowed",
        "terminating one for this zone does not count",
    ],
)
def test_zone_mode_needs_all_hints(endpoints: list[Endpoint], kept: str) -> None:
    """Zone mode applies only if every ready endpoint has a hint, and at least one hint is for this
    zone.
    """
    assert cluster(*endpoints) == kept


@pytest.mark.parametrize(("zone", "kept"), [("z1", "a"), ("z2", "b"), ("z9", "ab"), ("", "ab")])
def test_zone_of_this_node(zone: str, kept: str) -> None:
    """A node without a zone, or in a zone without hints, uses every ready endpoint."""
    topology = Topology(node="node-1", zone=zone)
    assert cluster(endpoint("a", zones="z1"), endpoint("b", zones="z2"), topology=topology) == kept


def test_zone_hint_of_no_name() -> None:
    """A node without a zone does not match a hint for the zone ""."""
    everywhere = Hints(frozenset({""}), frozenset())
    nameless = msgspec.structs.replace(endpoint("a"), hints=everywhere)
    topology = Topology(node="node-1", zone="")
    assert cluster(nameless, endpoint("b", zones="z2"), topology=topology) == "ab"


@pytest.mark.parametrize(
    ("endpoints", "kept"),
    [
        (
            [endpoint("a", nodes="node-1", zones="z1"), endpoint("b", nodes="node-2", zones="z1")],
            "a",
        ),
        ([endpoint("a", nodes="node-1 node-2"), endpoint("b", nodes="node-2")], "a"),
        ([endpoint("a", nodes="node-1", zones="z1"), endpoint("b", zones="z1")], "ab"),
        ([endpoint("a", nodes="node-1", zones="z2"), endpoint("b", zones="z1")], "b"),
        (
            [endpoint("a", nodes="node-2", zones="z1"), endpoint("b", nodes="node-3", zones="z2")],
            "a",
        ),
        ([endpoint("a", nodes="node-2"), endpoint("b", nodes="node-3")], "ab"),
        ([endpoint("a", nodes="node-1", zones="z2"), unready("b")], "a"),
    ],
    ids=[
        "node before zone",
        "several nodes each",
        "one without node hint: zone",
        "one without node hint: zone, elsewhere",
        "none for this node: zone",
        "none for this node nor zone",
        "an unready one needs no hint",
    ],
)
def test_node_mode_comes_before_zone_mode(endpoints: list[Endpoint], kept: str) -> None:
    """Node mode comes first, by the same rule; if it is off, zone mode is tried."""
    assert cluster(*endpoints) == kept


def test_the_hint_counts_not_the_place() -> None:
    """A local endpoint hinted for another zone is not in the cluster list."""
    assert cluster(endpoint("a", local=True, zones="z2"), endpoint("b", zones="z1")) == "b"


def test_local_list_ignores_hints() -> None:
    """Hints never narrow the local list, even while they narrow the cluster list."""
    here, there = endpoint("a", local=True, zones="z2"), endpoint("b", zones="z1")
    chosen = select((here, there), HERE)
    assert chosen.local == (here,)
    assert chosen.cluster == (there,)
