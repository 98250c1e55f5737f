# SPDX-License-Identifier: Apache-2.0
"""What an event has changed in the state of the cluster, for those who count and report it."""

from collections.abc import Mapping
from typing import NamedTuple

from ebpflb.errors import one_line
from ebpflb.model.endpoint_slices import StoredSlice
from ebpflb.model.events import Key, Kind

STAYS, IGNORED = "its last good state stays", "ignored: it was never valid here"


class ObjectWarning(NamedTuple):
    """One line for the operator about one object; ``effect``: what becomes of the object."""

    kind: Kind
    key: Key
    source: str
    text: str
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.kind} {self.key}: {self.reason}"

    @property
    def reason(self) -> str:
        """Without the object's name."""
        text = one_line(self.text)  # it quotes the object
        return f"{text} ({self.effect})" if self.effect else text


class SliceChange(NamedTuple):
    """An EndpointSlice before and after an event; None where there is none."""

    before: StoredSlice | None
    after: StoredSlice | None


class Applied(NamedTuple):
    """What one event changed; kube-proxy.md 14 and 16.4 say what of it is counted."""

    service_events: int  # how many Services the event was about, changed or not
    services: frozenset[Key]  # those of them whose service ports are others now
    slices: Mapping[Key, SliceChange]  # the EndpointSlices that are others now
    warnings: tuple[ObjectWarning, ...]
