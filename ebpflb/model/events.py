# SPDX-License-Identifier: Apache-2.0
"""How a cluster tells of its objects, whichever way it is read: the API and manifests alike."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ebpflb.errors import InvalidObject
from ebpflb.model.objects import Object


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
    """An object and where it was read (a file, or the API server): what a log line names.

    One that is there and cannot be read is the reason: its last good state stays.
    """

    object: Object | InvalidObject
    source: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The complete list of one kind: whatever is not in ``objects`` is gone."""

    kind: Kind
    objects: dict[Key, ReadObject]


@dataclass(frozen=True, slots=True)
class Changed:
    """One object was added or modified."""

    kind: Kind
    key: Key
    found: ReadObject


@dataclass(frozen=True, slots=True)
class Removed:
    """One object was deleted, or no longer matches the watch's selectors."""

    kind: Kind
    key: Key


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """A source can or cannot be read at present; ``reason`` is None when it is well again."""

    source: str
    reason: str | None


Event = Replaced | Changed | Removed | SourceStatus
