# SPDX-License-Identifier: Apache-2.0
"""The history of the fake API server, and the events that a watch with selectors gets from it."""

from typing import Any, NamedTuple

Json = dict[str, Any]


class Change(NamedTuple):
    """A version of the history: an object before and after, or a line to send as it is.

    ``lost``: no watch sends this change.
    """

    version: int
    before: Json | None = None
    after: Json | None = None
    line: bytes | None = None
    lost: bool = False


class Request(NamedTuple):
    kind: str
    query: dict[str, str]
    posted: Json | None = None
    patched: Json | None = None  # its path, type and body

    @property
    def is_watch(self) -> bool:
        return "watch" in self.query


def key(object: Json) -> tuple[str, str]:
    return object["metadata"].get("namespace", ""), object["metadata"]["name"]


def status(code: int, message: str) -> Json:
    return {"kind": "Status", "status": "Failure", "code": code, "message": message}


def event(change: Change, request: Request) -> Json | bytes | None:
    """Return the event of a change for a watch with these selectors."""
    if change.line is not None or change.lost:
        return change.line
    was, is_now = fits(change.before, request), fits(change.after, request)
    if is_now:
        return {"type": "MODIFIED" if was else "ADDED", "object": change.after}
    if not was:
        return None
    version = {"resourceVersion": str(change.version)}
    last: Json = change.before or {}
    return {"type": "DELETED", "object": last | {"metadata": last["metadata"] | version}}


def fits(object: Json | None, request: Request) -> bool:
    """Apply selectors of the forms that are needed: ``!label,!another``, ``a.b=c`` and
    ``a.b!=c``.
    """
    if object is None:
        return False
    labels = request.query.get("labelSelector", "").replace("!", "").split(",")
    test = request.query.get("fieldSelector", "")
    if set(labels) & set(object["metadata"].get("labels", {})):
        return False
    path, unequal, value = test.partition("!=") if "!=" in test else test.partition("=")
    found: Any = object
    for part in path.split(".") if path else ():
        found = found.get(part, "")
    return not test or (found == value) != (unequal == "!=")
