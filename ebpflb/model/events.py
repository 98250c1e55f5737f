# SPDX-License-Identifier: Apache-2.0
"""The events that a source of objects reports: the API server or a directory of manifests."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from ebpflb.errors import InvalidObject
from ebpflb.model.objects import Object

if TYPE_CHECKING:
    from ebpflb.model.endpoint_slices import ReadSlice


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
