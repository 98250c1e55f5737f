# SPDX-License-Identifier: Apache-2.0
"""Apply the rules of endpoint health to the cluster state, and say what is set aside.

Called by the agent's loop only: it takes what the watch has read, and the next sync plans the
Services whose endpoints have changed.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from ebpflb.agent.endpoint_watch import EndpointWatch
from ebpflb.cluster.event_recorder import object_limit
from ebpflb.history.records import WriteCause
from ebpflb.model.addresses import host_port
from ebpflb.model.annotations import HEALTH_OFF
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.drift import MAX_LISTED
from ebpflb.model.endpoint_health import EndpointHealth, Outcome, Outcomes, Place
from ebpflb.model.endpoints import UnusedReason, places
from ebpflb.model.events import Key
from ebpflb.model.services import PortName
from ebpflb.plan.entries import service_name

log = logging.getLogger(__name__)

_SET_ASIDE = (
    "endpoint {} is set aside on this node for {:g} s: three clients that had reached the Service"
    " could not open connections to it"
)


class EndpointHealthSync:
    """``record`` makes an Event about a Service, and ``because`` a line of the history.

    ``count``: how many endpoints are set aside now; ``times``: how often one was, since the start.
    Other threads may read both. ``watching``: whether a Service asked for it at the last ``turn``;
    otherwise there is no turn to be made. ``clock`` is a monotonic clock, in seconds.
    """

    def __init__(
        self,
        cluster: ClusterState,
        watch: EndpointWatch,
        because: Callable[[WriteCause], None],
        record: Callable[[Key, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._clock = cluster, clock
        self.watch = watch
        self._because, self._record = because, record
        self._may_warn = object_limit(clock).allows
        self._health = EndpointHealth()
        self.count = self.times = 0
        self.watching = False

    @property
    def due(self) -> float:
        """When ``turn`` brings an endpoint back, by the clock."""
        return self._health.due

    @property
    def listed(self) -> Mapping[str, str]:
        """Service port -> its endpoints that are set aside, for any reason; of some ports only."""
        ports = islice(self._cluster.unhealthy, MAX_LISTED)
        return {service_name(port, 0): in_words(self._cluster.set_aside(port)) for port in ports}

    def take(self, message: Outcomes) -> None:
        """Apply what the programs have counted."""
        for outcome in message.outcomes:
            if ready := self._ready(outcome.port):
                self._apply(outcome, ready)

    def turn(self) -> None:
        """Bring endpoints back whose time has ended; forget those that are not ready."""
        self.watching = bool(self._cluster.watched)
        self.watch.set(wanted=self.watching)
        for port, place in self._health.expire(self._clock()):
            self._changed(port, place, "used again after its time")
        changed = self._cluster.changed_services
        for port in [port for port in self._health.ports if port.owner in changed]:
            for place in self._health.keep(port, self._ready(port)):
                self._changed(port, place, "not set aside any more")

    def _apply(self, outcome: Outcome, ready: frozenset[Place]) -> None:
        port, place = outcome.port, outcome.place
        if outcome.has_opened and self._health.opens(port, place):
            self._changed(port, place, "reached again")
        if not outcome.has_failed:
            return
        if seconds := self._health.fails(port, place, ready, self._clock()):
            self.times += 1
            self._changed(port, place, "set aside")
            note = _SET_ASIDE.format(host_port(*place), seconds)
            if self._may_warn(port.owner):
                log.warning("Service %s: %s", port, note)
                self._record(port.owner, note)

    def _ready(self, port: PortName) -> frozenset[Place]:
        """Return the endpoints that the API calls ready; none if they are not watched."""
        ports = self._cluster.services.get(port.owner, ())
        if not any(it.name == port and it.endpoint_health != HEALTH_OFF for it in ports):
            return frozenset()
        found = self._cluster.listed_endpoints(port)
        return places(each for each in found if each.ready and each.weight)

    def _changed(self, port: PortName, place: Place, event: str) -> None:
        self._cluster.set_unhealthy(port, UnusedReason.SET_ASIDE, self._health.set_aside(port))
        self.count = sum(len(self._health.set_aside(each)) for each in self._health.ports)
        self._because(WriteCause(event, "endpoint", f"{port} {host_port(*place)}"))


def in_words(aside: Iterable[Place]) -> str:
    """Return the endpoints, or some of many."""
    return ", ".join(sorted(host_port(*place) for place in islice(aside, MAX_LISTED)))
