# SPDX-License-Identifier: Apache-2.0
"""What a source of objects reports, be it the API server or a directory of manifests."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

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
    """Which object: ``namespace`` is "" where the kind has none."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ReadObject(NamedTuple):
    """An object, and where it was read, for log lines: a file, or the API server.

    Of an object that cannot be decoded there is the error only; its last good state stays. An
    EndpointSlice may have been read already, so that a list of many need not hold them as decoded.
    """

    object: "Object | ReadSlice | InvalidObject"
    source: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The complete list of one kind: what is not in ``objects`` does not exist any more.

    ``version`` is the resourceVersion of all events, "" where the source has none.
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
    event: str = field(default="changed", compare=False)  # as the API calls it, in lower case


@dataclass(frozen=True, slots=True)
class Removed:
    """One object was deleted, or no longer matches the watch's selectors."""

    kind: Kind
    key: Key
    version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """Whether a source can be read at present; ``error`` is None when it has recovered."""

    source: str
    error: str | None


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Something of what this check of the audit compares may have been taken away."""

    check: str


ObjectEvent = Replaced | Changed | Removed
Event = ObjectEvent | SourceStatus
