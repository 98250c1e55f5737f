# SPDX-License-Identifier: Apache-2.0
"""What a node says of its Services in the API, so that no pods come before Services work.

A condition of the Node, which others may act upon, or a taint that is removed
(docs/node-readiness.md).
"""

from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from ebpflb.model.objects import Node

KINDS = (OFF, CONDITION, TAINT) = ("off", "condition", "taint")

CONDITION_TYPE = "ebpflb.io/ServicesReady"
TAINT_KEY = "ebpflb.io/agent-not-ready"

MERGE_PATCH = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"


class Said(NamedTuple):
    """The condition's state. Every node's readers may see it, so it names nothing of tenants."""

    status: str
    reason: str
    message: str


READY = Said("True", "ServicesInPlace", "all Services are in place on this node")
NOT_READY = Said("False", "ServicesNotInPlace", "`ebpflb status` on the node says why")
STOPPED = Said("Unknown", "AgentStopped", "the agent was stopped; no change is followed")


class Patch(NamedTuple):
    """A PATCH to the Node, below its path in the API."""

    subresource: str
    content_type: str
    body: bytes


def condition_patch(said: Said, former: Said | None, now: float) -> Patch:
    """Return the patch that makes the Node say this; ``now`` is in seconds since the epoch.

    A strategic merge patch finds the condition by its type and leaves all others alone. Without
    the time of the transition that of the Node stays.
    """
    at = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%SZ}"
    condition = {"type": CONDITION_TYPE, **said._asdict(), "lastHeartbeatTime": at}
    if former is None or former.status != said.status:
        condition["lastTransitionTime"] = at
    body = {"status": {"conditions": [condition]}}
    return Patch("/status", MERGE_PATCH, msgspec.json.encode(body))


def taint_patch(node: Node) -> Patch | None:
    """Return the patch that removes our taint, whatever its effect; None if there is none.

    If the Node's taints have changed meanwhile, the patch changes nothing and fails.
    """
    taints = (node.spec and node.spec.taints) or []
    ours = [index for index, taint in enumerate(taints) if taint.key == TAINT_KEY]
    operations: list[dict[str, Any]] = []
    for index in reversed(ours):
        path = f"/spec/taints/{index}"
        operations.append({"op": "test", "path": f"{path}/key", "value": TAINT_KEY})
        operations.append({"op": "remove", "path": path})
    return Patch("", JSON_PATCH, msgspec.json.encode(operations)) if ours else None
