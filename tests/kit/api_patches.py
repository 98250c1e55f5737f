# SPDX-License-Identifier: Apache-2.0
"""Patches of Nodes and Services, as an API server applies those that the agent sends."""

import copy
from typing import Any

from tests.kit.api_history import Json

MERGE, OPERATIONS = "application/strategic-merge-patch+json", "application/json-patch+json"
PLAIN_MERGE = "application/merge-patch+json"


class Refused(Exception):
    """The patch cannot be applied."""

    def __init__(self, text: str, code: int = 422) -> None:
        super().__init__(text)
        self.code = code


def patched(path: str) -> tuple[str, tuple[str, str]]:
    """Return kind, namespace and name of the object that a path names."""
    words = path.removesuffix("/status").split("/")
    if "namespaces" in words:
        return "Service", (words[4], words[6])
    return "Node", ("", words[-1])


def applied(object: Json, content_type: str, body: Any) -> Json:
    """Return the object with the patch. Raises Refused if a test of it fails."""
    made = copy.deepcopy(object)
    if content_type == PLAIN_MERGE:
        return _with_status(made, body)
    if content_type == OPERATIONS:
        for operation in body:
            _apply(made, operation)
        return made
    assert content_type == MERGE, content_type
    assert body.keys() == {"status"} and body["status"].keys() == {"conditions"}, body
    conditions = made.setdefault("status", {}).setdefault("conditions", [])
    for condition in body["status"]["conditions"]:
        found = [each for each in conditions if each["type"] == condition["type"]]
        if not found:
            found = [{}]
            conditions += found
        found[0].update(condition)
    return made


def _with_status(service: Json, body: Json) -> Json:
    """A Service's status, if the Service still has the version of the patch (RFC 7396)."""
    assert body.keys() == {"metadata", "status"} and body["metadata"].keys() == {"resourceVersion"}
    if body["metadata"]["resourceVersion"] != service["metadata"]["resourceVersion"]:
        raise Refused("the object has been modified", 409)
    ingress = body["status"]["loadBalancer"]["ingress"]
    service["status"] = {"loadBalancer": {"ingress": ingress} if ingress else {}}
    return service


def _apply(node: Json, operation: Json) -> None:
    """Apply RFC 6902: test and remove."""
    *path, last = operation["path"].removeprefix("/").split("/")
    at: Any = node
    try:
        for part in path:
            at = at[int(part) if isinstance(at, list) else part]
        key: Any = int(last) if isinstance(at, list) else last
        if operation["op"] == "test" and at[key] != operation["value"]:
            raise Refused(f"the server rejected our request: test failed: {operation['path']}")
        if operation["op"] == "remove":
            del at[key]
    except (KeyError, IndexError):
        raise Refused(f"no such path: {operation['path']}") from None
