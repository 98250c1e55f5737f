# SPDX-License-Identifier: Apache-2.0
"""The nodes that load balancers should use, and the reasons (kube-proxy.md 13.1, 16.4)."""

from typing import Any

import msgspec
import pytest

from ebpflb.lab import manifests
from ebpflb.model import nodes, objects
from tests.model import builders


def node(spec: dict[str, Any] | None = None, **metadata: Any) -> objects.Node:
    manifest = manifests.node("here")
    manifest["metadata"] |= metadata
    manifest["spec"] = spec
    return msgspec.convert(manifest, objects.Node)


def test_node_that_is_being_deleted_is_not_eligible() -> None:
    """metadata.deletionTimestamp is set."""
    assert nodes.eligible(node())
    assert not nodes.eligible(node(deletionTimestamp="2026-01-01T00:00:00Z"))


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute", "PreferNoSchedule", ""])
@pytest.mark.parametrize("value", [{}, {"value": ""}, {"value": "1700000000"}])
def test_autoscalers_taint_makes_it_ineligible(effect: str, value: dict[str, str]) -> None:
    """Any effect and any value; only the key matters."""
    other = {"key": "other", "effect": effect}
    doomed = {"key": "ToBeDeletedByClusterAutoscaler", "effect": effect} | value
    assert not nodes.eligible(builders.node(taints=[other, doomed]))


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {"taints": None},
        {"taints": []},
        {"unschedulable": True, "taints": [{"key": "node.kubernetes.io/unschedulable"}]},
        {"taints": [{"key": "node.kubernetes.io/not-ready"}, {"key": "tobedeleted"}]},
        {"taints": [{"key": "DeletionCandidateOfClusterAutoscaler"}]},
    ],
)
def test_other_taints_and_unschedulable_do_not_matter(spec: dict[str, Any] | None) -> None:
    """A cordoned node still gets traffic."""
    assert nodes.eligible(node(spec))
