# SPDX-License-Identifier: Apache-2.0
"""Which writes of an agent to Nodes and Services the chart's admission policies admit, evaluated by
a CEL runtime.

The API server evaluates the same expressions; only ``variables`` are its own.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from cel_expr_python import cel

from ebpflb.model.nodes import (
    CONDITION_TYPE,
    NOT_READY,
    READY,
    TAINT_KEY,
    condition_patch,
    taint_patch,
)
from ebpflb.model.objects import Node
from tests.deploy import helm
from tests.kit import api_patches
from tests.kit.api_history import Json

AGENT = "system:serviceaccount:kube-system:ebpflb"
NODE_NAME = "authentication.kubernetes.io/node-name"
NODE: Json = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {
        "name": "node-1",
        "uid": "1",
        "resourceVersion": "7",
        "labels": {"kubernetes.io/os": "linux"},
        "annotations": {"a": "b"},
        "managedFields": [{"manager": "kubelet"}],
    },
    "spec": {
        "podCIDR": "10.244.1.0/24",
        "podCIDRs": ["10.244.1.0/24"],
        "taints": [
            {"key": "dedicated", "value": "db", "effect": "NoSchedule"},
            {"key": TAINT_KEY, "effect": "NoSchedule"},
        ],
    },
    "status": {
        "capacity": {"cpu": "2"},
        "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
        "conditions": [{"type": "Ready", "status": "True"}],
        "nodeInfo": {"kernelVersion": "6.1"},
        "images": [{"names": ["a"], "sizeBytes": 1}],
    },
}

Change = Callable[[Json], Any]
"""Changes a Node in place."""


class Policy:
    """The chart's policy, and the account whose requests it checks."""

    def __init__(self, policy: Json) -> None:
        names = ("object", "oldObject", "request", "variables")
        self._env = cel.NewEnv(variables=dict.fromkeys(names, cel.Type.DYN))
        self._spec = policy["spec"]

    def _eval(self, expression: str, known: Json) -> Any:
        return self._env.compile(expression).eval(data=known).plain_value()

    def denies(self, old: Json | None, new: Json | None, request: Json) -> str:
        """Return the message of the first rule that denies the request; "" if none does."""
        known: Json = {"object": new, "oldObject": old, "request": request, "variables": {}}
        if not all(self._eval(it["expression"], known) for it in self._spec["matchConditions"]):
            return ""
        try:
            for each in self._spec["variables"]:
                known["variables"][each["name"]] = self._eval(each["expression"], known)
        except Exception:  # an operation that has no object
            assert None in (old, new) and self._spec["failurePolicy"] == "Fail"
        for rule in self._spec["validations"]:
            if self._eval(rule["expression"], known) is not True:
                return str(rule["message"])
        return ""


def rendered(values: Json) -> Policy:
    (objects,) = helm.render(values)
    binding = helm.the("ValidatingAdmissionPolicyBinding", objects)["spec"]
    found = helm.the("ValidatingAdmissionPolicy", objects)
    assert binding == {"policyName": found["metadata"]["name"], "validationActions": ["Deny"]}
    return Policy(found)


@pytest.fixture(scope="module", params=["condition", "taint"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return rendered({"nodeReadiness": request.param})


def asked(node: str = "node-1", name: str = "node-1", user: str = AGENT, **more: Any) -> Json:
    """Return a request about the Node ``name`` from an agent on ``node``."""
    info = {"username": user, "extra": {NODE_NAME: [node]} if node else {"other": ["x"]}}
    return {"operation": "UPDATE", "name": name, "userInfo": info} | more


def after(change: Change) -> Json:
    made = copy.deepcopy(NODE)
    change(made)
    return made


def patched(patch: Any) -> Json:
    body = json.loads(patch.body)
    return api_patches.applied(NODE, patch.content_type, body)


def test_what_the_agent_writes_is_admitted(policy: Policy) -> None:
    """The agent writes the condition, new or changed, and the taint's removal; the server adds
    more.
    """
    first = patched(condition_patch(NOT_READY, None, 0.0))
    assert policy.denies(NODE, first, asked(subResource="status")) == ""
    second = copy.deepcopy(first)
    second["status"]["conditions"][1] |= READY._asdict()
    second["metadata"]["resourceVersion"] = "8"
    second["metadata"]["managedFields"].append({"manager": "ebpflb"})
    assert policy.denies(first, second, asked(subResource="status")) == ""
    patch = taint_patch(msgspec.convert(NODE, Node))
    assert patch and policy.denies(NODE, patched(patch), asked()) == ""
    assert policy.denies(NODE, NODE, asked()) == ""


OWN = "an agent may only change the Node on which it runs"
METADATA = "an agent may change no metadata"
SPEC = "an agent may change nothing of the spec, except that it removes its own taint"
STATUS = "an agent may change nothing of the status, except its own condition"

CHANGES: list[tuple[str, Change]] = [
    (METADATA, lambda node: node["metadata"]["labels"].update(x="y")),
    (METADATA, lambda node: node["metadata"]["annotations"].update(a="c")),
    (METADATA, lambda node: node["metadata"].update(finalizers=["x"])),
    (SPEC, lambda node: node["spec"].update(unschedulable=True)),
    (SPEC, lambda node: node["spec"].pop("podCIDRs")),
    (SPEC, lambda node: node["spec"].update(aFieldOfTheFuture=1)),
    (SPEC, lambda node: node["spec"]["taints"].pop(0)),
    (SPEC, lambda node: node["spec"].pop("taints")),
    (SPEC, lambda node: node["spec"]["taints"].append({"key": TAINT_KEY, "effect": "NoExecute"})),
    (SPEC, lambda node: node["spec"]["taints"][0].update(effect="NoExecute")),
    (SPEC, lambda node: node["spec"]["taints"][1].update(effect="NoExecute")),
    (STATUS, lambda node: node["status"].update(addresses=[])),
    (STATUS, lambda node: node["status"].update(aFieldOfTheFuture=1)),
    (STATUS, lambda node: node["status"]["conditions"][0].update(status="False")),
    (STATUS, lambda node: node["status"]["conditions"].append({"type": "DiskPressure"})),
    (STATUS, lambda node: node["status"].pop("conditions")),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_nothing_else_is_admitted(policy: Policy, number: int) -> None:
    """Other changes are denied, alone or together with admitted changes."""
    message, change = CHANGES[number]
    assert policy.denies(NODE, after(change), asked()) == message
    also = after(change)
    also["status"].setdefault("conditions", []).append({"type": CONDITION_TYPE, "status": "True"})
    assert policy.denies(NODE, also, asked(subResource="status")) == message


@pytest.mark.parametrize(
    "request_",
    [
        asked(node="node-2"),
        asked(node=""),
        {"operation": "UPDATE", "name": "node-1", "userInfo": {"username": AGENT}},
    ],
    ids=["another node's agent", "a token of no node", "no claims"],
)
def test_only_the_own_node(policy: Policy, request_: Json) -> None:
    """The token names the node of the pod; without a node in the token nothing is admitted."""
    changed = patched(condition_patch(READY, None, 0.0))
    assert policy.denies(NODE, changed, request_) == OWN


@pytest.mark.parametrize("operation", ["CREATE", "DELETE"])
def test_nodes_are_neither_made_nor_deleted(policy: Policy, operation: str) -> None:
    """The policy denies it, whatever other roles the agent's account has."""
    old, new = (None, NODE) if operation == "CREATE" else (NODE, None)
    assert policy.denies(old, new, asked(operation=operation)) == OWN


def test_others_are_not_concerned(policy: Policy) -> None:
    """The policy ignores the kubelet, and agents of another release's account."""
    for user in ("system:node:node-1", "system:serviceaccount:other:ebpflb"):
        assert policy.denies(NODE, after(CHANGES[0][1]), asked(user=user)) == ""


def served(*ips: str, **spec: Any) -> Json:
    ingress = {"ingress": [{"ip": it, "ipMode": "VIP"} for it in ips]} if ips else {}
    kept = {"loadBalancer": ingress, "conditions": [{"type": "x"}]}
    return {"metadata": {"name": "web", "labels": {"a": "b"}}, "spec": spec, "status": kept}


def test_addresses_only_for_services_of_the_own_class() -> None:
    """Other Services may lose some, as those do that were of the class before."""
    services = rendered({"l2Pools": ["192.0.2.0/28"]})
    ours, write = {"loadBalancerClass": "ebpflb.io/l2"}, asked(name="web", subResource="status")
    a, b = "192.0.2.1", "192.0.2.2"
    for old, new in (
        (served(**ours), served(a, b, **ours)),
        (served(a, **ours), served(b, **ours)),
        (served(a, b), served(a)),
        (served(a), served()),
    ):
        assert services.denies(old, new, write) == ""
    wrong = "an agent may give no address to a Service of another class"
    for spec in ({}, {"loadBalancerClass": "metallb.io/l2"}):
        assert services.denies(served(**spec), served(a, **spec), write) == wrong
        assert services.denies(served(a, **spec), served(b, **spec), write) == wrong
    before = served(a, **ours)
    assert services.denies(before, before | {"metadata": {"name": "web"}}, write) == METADATA
    other = before | {"status": before["status"] | {"conditions": []}}
    assert "except addresses" in services.denies(before, other, write)
    only = "an agent may only change the status of a Service"
    for operation, subresource in (("UPDATE", ""), ("DELETE", ""), ("CREATE", "")):
        wanted = asked(name="web", operation=operation, subResource=subresource)
        assert services.denies(before, before, wanted) == only
