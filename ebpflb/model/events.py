# SPDX-License-Identifier: Apache-2.0
"""What the agent is told: events of the source of objects, and differences that an audit found.

The source is the API server or a directory of manifests.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from ebpflb.errors import InvalidObject
from ebpflb.model.objects import Object

if TYPE_CHECKING:
    from ebpflb.model.endpoint_slices import ReadSlice
from collections.abc import Iterable, Sequence


class Kind(StrEnum):
    SERVICE = "Service"
    ENDPOINT_SLICE = "EndpointSlice"
    NODE = "Node"
    SERVICE_CIDR = "ServiceCIDR"

    @property
    def namespaced(self) -> bool:
        return self in (Kind.SERVICE, Kind.ENDPOINT_SLICE)


class Key(NamedTuple):
    """The identity of an object; ``namespace`` is "" for cluster-scoped kinds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ReadObject(NamedTuple):
    """An object and its source, a file or the API server, for log lines.

    ``object`` is an error if it cannot be decoded; the last valid version then stays in use. An
    EndpointSlice may already be read, so that a list of many slices need not hold decoded objects.
    """

    object: "Object | ReadSlice | InvalidObject"
    source: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The complete list of one kind: an object that is not in ``objects`` does not exist any more.

    ``version`` is the resourceVersion of all events, "" if the source has none.
    """

    kind: Kind
    objects: dict[Key, ReadObject]
    version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Changed:
    """One object was added or modified."""

    kind: Kind
    key: Key
    found: ReadObject
    version: str = field(default="", compare=False)
    event: str = field(default="changed", compare=False)  # the API's name, in lower case


@dataclass(frozen=True, slots=True)
class Removed:
    """One object was deleted, or no longer matches the watch's selectors."""

    kind: Kind
    key: Key
    version: str = field(default="", compare=False)


class SourceStatus(Struct, frozen=True):
    """Whether a source can currently be read; ``error`` is None after it has recovered.

    ``is_forbidden``: a right is missing, so that trying again hardly helps.
    """

    source: str
    error: str | None
    is_forbidden: bool = False


class Together(NamedTuple):
    """The events of one change, such as a write of a file; all are applied in one plan."""

    events: tuple["Event", ...]


class PartStatus(Struct, frozen=True):
    """A part of the agent failed by an unexpected exception; ``error`` is None once it works."""

    part: str
    error: str | None


class Disturbed(Struct, frozen=True):
    """An object that this check of the audit compares may have been removed."""

    check: str


ObjectEvent = Replaced | Changed | Removed
Event = ObjectEvent | SourceStatus


# Differences between the kernel and the plan that an audit found.


MAX_NAMED_IN_LINE, MAX_LISTED = 10, 100  # in one line, and in the status


class Part(StrEnum):
    """The kind of object that differs. The values are labels of metrics."""

    HOOK = "hook"  # a program at the cgroup
    DEVICE = "device"  # the programs at a device
    MAP = "map"  # an entry of a map
    PIN = "pin"  # a name in the state directory
    TABLE = "table"  # the nft table of the netfilter engine, and its elements
    FLOWTABLE = "flowtable"  # the kernel's flowtable, of --fast-forward


# If one of these differs, the data plane is not fully in force. A link or map without its pin works
# as long as the agent holds it.
IN_FORCE = frozenset({Part.HOOK, Part.DEVICE, Part.MAP, Part.TABLE})


class Drift(NamedTuple):
    """A difference: ``name`` is the object, ``found`` the difference, both for the operator."""

    part: Part
    name: str
    found: str

    def __str__(self) -> str:
        return f"{self.name} {self.found}"


class AuditReport(Struct):
    """The agent's answer to `ebpflb doctor`.

    ``unfinished``: the checks that had no result in time; ``objects``: of the cluster, with how the
    agent's copy differs; ``not_listed``: why they could not be listed, or "".
    """

    drift: list[Drift]
    errors: dict[str, str]
    unfinished: list[str]
    objects: dict[str, str]
    not_listed: str
    repairs: bool  # the agent corrects what differs from its plan


def in_force(drifts: Iterable[Drift]) -> bool:
    """Whether the data plane is in force in spite of these differences."""
    return not any(drift.part in IN_FORCE for drift in drifts)


def named(drifts: Sequence[Drift]) -> dict[str, str]:
    """Return name -> difference; the last one of equal names, and at most MAX_LISTED."""
    listed = {drift.name: drift.found for drift in _every_thing_first(drifts)[:MAX_LISTED]}
    more = len(drifts) - MAX_LISTED
    return listed | ({f"{more} more": "differ"} if more > 0 else {})


def summary(drifts: Sequence[Drift]) -> str:
    """Return one line that names MAX_NAMED_IN_LINE differences, or one for each object if more."""
    things = {_thing(drift) for drift in drifts}
    count = max(MAX_NAMED_IN_LINE, len(things))
    named = "; ".join(map(str, _every_thing_first(drifts)[:count]))
    more = len(drifts) - count
    return f"{named}; and {more} more" if more > 0 else named


def _every_thing_first(drifts: Sequence[Drift]) -> list[Drift]:
    """Return one difference of each object first, then the others.

    So a map that lost all its entries does not hide other objects.
    """
    firsts: list[Drift] = []
    others: list[Drift] = []
    seen: set[tuple[Part, str]] = set()
    for drift in drifts:
        (others if _thing(drift) in seen else firsts).append(drift)
        seen.add(_thing(drift))
    return firsts + others


def _thing(drift: Drift) -> tuple[Part, str]:
    """Return the map of an entry; all hooks count as one object, and so do all devices."""
    return drift.part, drift.name.partition(":")[0] if drift.part is Part.MAP else ""
