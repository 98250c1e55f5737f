# SPDX-License-Identifier: Apache-2.0
"""What the agent tells others of its turns: whether it keeps up, what it did, how long that took.

A change is heard, waits, and is covered by a sync: one write of all that waits. Health, metrics
and health-check node ports follow from these three (kube-proxy.md 10, 13.1, 14 and 16.4).
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from ebpflb.model import endpoints
from ebpflb.model.addresses import Address, Family
from ebpflb.model.cluster_state import ClusterState, Remark
from ebpflb.model.events import Changed, Event, Key, Kind, Removed, Replaced
from ebpflb.model.health import Checked
from ebpflb.model.latency import Triggers
from ebpflb.model.no_local import NoLocal
from ebpflb.model.objects import EndpointSlice
from ebpflb.serve.health import Health
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.service_health import ServiceHealth


class Report:
    """Told by the agent's thread."""

    def __init__(
        self,
        health: Health,
        metrics: Metrics,
        service_health: ServiceHealth,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock`` gives seconds since the epoch."""
        self._health, self._metrics, self._service_health = health, metrics, service_health
        self._clock = clock
        metrics.queued()  # as kube-proxy does when it begins
        self._triggers = Triggers(since=clock())
        self._services: set[Key] = set()  # that wait for the next sync
        self._slices: set[Key] = set()

    def hear(self, event: Event, cluster: ClusterState) -> list[Remark]:
        """The picture takes an event in; what is another one after it waits for the next sync."""
        services = _held(event, Kind.SERVICE, cluster.services)
        slices = _held(event, Kind.ENDPOINT_SLICE, cluster.slices)
        remarks = cluster.hear(event)
        changed = {key for key in slices if cluster.slices.get(key) is not slices[key]}
        for key in changed:
            self._trace(slices[key], cluster.slices.get(key))
        self._services |= {k for k in services if cluster.services.get(k) is not services[k]}
        self._slices |= changed
        self._metrics.service_changes(len(services))
        self._metrics.endpoint_changes(len(changed))
        self._metrics.pending(len(self._services), len(self._slices))
        return remarks

    def queued(self) -> None:
        """Something waits to be written."""
        self._health.queued()
        self._metrics.queued()

    def synced(
        self,
        seconds: float,
        *,
        full: bool,
        checks: Mapping[Key, Checked],
        listening: Mapping[Family, Collection[Address]],
        no_local: NoLocal,
    ) -> None:
        """All that waited is in the maps. ``checks`` are what health-check node ports say, and
        ``listening`` where: in a family that is not named, anywhere.
        """
        self._metrics.synced(seconds, full=full)
        self._services, self._slices = set(), set()
        now = self._clock()
        for family, times in self._triggers.take().items():
            self._metrics.programmed(family, [now - time for time in times])
        self._health.synced()
        self._metrics.no_local_endpoints(no_local.counts)
        self._service_health.update(checks, listening)

    def failed(self, seconds: float, *, full: bool) -> None:
        """What waited could not be written, and waits on."""
        self._metrics.failed(seconds, full=full)

    def follow(self, cluster: ClusterState) -> None:
        """The Node as it is now."""
        self._health.set_node(cluster.node)

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


_Kept = TypeVar("_Kept")


def _held(event: Event, kind: Kind, held: Mapping[Key, _Kept]) -> dict[Key, _Kept | None]:
    """What the picture holds of the objects of a kind that an event is about."""
    match event:
        case Replaced(of, objects) if of is kind:
            return {key: held.get(key) for key in held.keys() | objects.keys()}
        case Changed(of, key) | Removed(of, key) if of is kind:
            return {key: held.get(key)}
    return {}
