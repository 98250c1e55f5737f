# SPDX-License-Identifier: Apache-2.0
"""What the agent tells others of its turns: whether it keeps up, what it did, how long that took.

A change is heard, waits, and is covered by a sync: one write of all that waits. Health, metrics
and health-check node ports follow from these three (kube-proxy.md 10, 13.1, 14 and 16.4).
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from ebpflb.model import endpoints
from ebpflb.model.addresses import Address, Family
from ebpflb.model.events import Changed, Event, Key, Kind, Removed, Replaced
from ebpflb.model.health import Checked
from ebpflb.model.latency import Triggers
from ebpflb.model.no_local import NoLocal
from ebpflb.model.objects import EndpointSlice, Object
from ebpflb.model.picture import Picture
from ebpflb.serve.health import Health
from ebpflb.serve.metrics import Metrics


class Checks(Protocol):
    """What we need of ``ServiceHealth``."""

    def listen_at(self, addresses: Mapping[Family, Collection[Address]]) -> None: ...

    def update(self, wanted: Mapping[Key, Checked]) -> None: ...


class Report:
    """Told by the agent's thread; ``checks`` are the health-check node ports."""

    def __init__(
        self,
        health: Health,
        metrics: Metrics,
        checks: Checks,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock`` gives seconds since the epoch."""
        self.checks = checks
        self._health, self._metrics = health, metrics
        self._clock = clock
        metrics.queued()  # as kube-proxy does when it begins
        self._triggers = Triggers(since=clock())

    def hear(self, event: Event, picture: Picture) -> None:
        """An event, before the picture takes it in."""
        match event:
            case Replaced(Kind.SERVICE, objects):
                self._metrics.service_changes(len(objects))
            case Changed(Kind.SERVICE) | Removed(Kind.SERVICE):
                self._metrics.service_changes(1)
            case _:
                slices = list(_slices(event, picture))
                for former, slice in slices:
                    self._trace(former, slice)
                self._metrics.endpoint_changes(len(slices))

    def queued(self) -> None:
        """Something waits to be written."""
        self._health.queued()
        self._metrics.queued()

    def synced(
        self, seconds: float, *, full: bool, checks: Mapping[Key, Checked], no_local: NoLocal
    ) -> None:
        """All that waited is in the maps."""
        self._metrics.synced(seconds, full=full)
        now = self._clock()
        for family, times in self._triggers.take().items():
            self._metrics.programmed(family, [now - time for time in times])
        self._health.synced()
        self._metrics.no_local_endpoints(no_local.counts)
        self.checks.update(checks)

    def failed(self, seconds: float, *, full: bool) -> None:
        """What waited could not be written, and waits on."""
        self._metrics.failed(seconds, full=full)

    def follow(self, picture: Picture) -> None:
        """The Node as it is now."""
        self._health.set_node(picture.node)

    def _trace(self, former: EndpointSlice | None, slice: EndpointSlice | None) -> None:
        known = slice or former
        service = endpoints.service_of(known) if known else None
        if known is None or service is None or known.address_type not in _FAMILIES:
            return
        family = _FAMILIES[known.address_type]
        if slice is None:
            self._triggers.removed(service, family)
            return
        annotations = slice.metadata.annotations
        said = annotations.last_change_trigger_time if annotations else None
        self._triggers.changed(service, family, said)


_FAMILIES = {str(family): family for family in Family}


def _slices(
    event: Event, picture: Picture
) -> Iterator[tuple[EndpointSlice | None, EndpointSlice | None]]:
    """The slices that an event changes, as they were and as they become."""
    changes: dict[Key, Object | None] = {}
    match event:
        case Replaced(Kind.ENDPOINT_SLICE, objects, broken):
            changes |= dict.fromkeys(picture.slices.keys() - objects.keys() - broken)
            changes |= {key: found.object for key, found in objects.items()}
        case Changed(Kind.ENDPOINT_SLICE, key, found):
            changes[key] = found.object
        case Removed(Kind.ENDPOINT_SLICE, key):
            changes[key] = None
    for key, slice in changes.items():
        former = picture.slices.get(key)
        if slice != former and (slice is None or isinstance(slice, EndpointSlice)):
            yield former, slice
