# SPDX-License-Identifier: Apache-2.0
"""Patches, applied as an API server does, for the kinds that the agent sends."""

import copy
from typing import Any

from tests.kit.api_history import Json

MERGE, OPERATIONS = "application/strategic-merge-patch+json", "application/json-patch+json"


STATUS = "application/merge-patch+json"


class Refused(Exception):
    """The patch cannot be applied."""


class Conflict(Refused):
    """The object is not the one that the client has read."""


def applied(node: Json, content_type: str, body: Any) -> Json:
    """Return the Node, or the Service, with the patch applied.

    Raises Refused if a test in the patch fails, Conflict for a wrong resourceVersion.
    """
    made = copy.deepcopy(node)
    if content_type == STATUS:
        assert body.keys() == {"metadata", "status"} and body["status"].keys() == {"loadBalancer"}
        if body["metadata"] != {"resourceVersion": node["metadata"]["resourceVersion"]}:
            raise Conflict("the object has been modified")
        made["status"] = {"loadBalancer": {"ingress": body["status"]["loadBalancer"]["ingress"]}}
        return made
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
