# SPDX-License-Identifier: Apache-2.0
"""Endpoint health: read what programs count of failed connections, and set endpoints aside.

Called by the agent's loop only: it takes what the watch has read, and the next sync plans the
Services whose endpoints have changed.
"""

import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from struct import Struct

from ebpflb.cluster.event_recorder import object_limit
from ebpflb.entries.services import service_name
from ebpflb.errors import EbpflbError, in_words, log_once
from ebpflb.history.records import WriteCause
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.bpf_map import Map, MappedArray
from ebpflb.kernel.maps.layout import columns, ffi
from ebpflb.kernel.maps.records import BackendHealth, ServiceBackend
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.model.addresses import Family, host_port
from ebpflb.model.annotations import HEALTH_OFF
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoint_health import EndpointHealth, Outcome, Outcomes, Place
from ebpflb.model.endpoints import UnusedReason, places
from ebpflb.model.events import MAX_LISTED, Key
from ebpflb.model.services import PortName, Protocol
from ebpflb.workers import DueWorker

# Read what the programs count about endpoints that do not answer (bpf/core/endpoint_health.h).
#
# While some Service wants it, a thread keeps a program attached for the connections of sockets
# (bpf/hooks/socket_opening.c), has the programs at the devices note the connections of packets
# (bpf/path/attempt.h), and reads the counts every READ_SECONDS. The attached program has no pin: it
# ends with the agent, as nothing is set aside without one. Otherwise nothing is attached or read.


log = logging.getLogger(__name__)

MAP = "backend_health"
READ_SECONDS, RETRY_SECONDS = 0.5, 30.0
MOST_OUTCOMES = 64  # in one read: each may change a Service; the others stay for the next read

_KEY, _SWITCH = Struct("=II"), Struct("=Q")
_SWITCH_AT = ffi.offsetof("struct flow_gate", "endpoint_health")
_COUNTED = columns("struct backend_health", third="Q", has_opened="I")


class EndpointWatch(DueWorker):
    """``put`` takes the outcomes; ``clock`` is a monotonic clock, in seconds."""

    def __init__(
        self,
        maps: Mapping[str, Map],
        cache: Path,
        cgroup: Path,
        put: Callable[[Outcomes], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("endpoint-health", clock)
        self._maps, self._cache, self._cgroup, self._put = maps, cache, cgroup, put
        self._is_wanted = False
        self._due = math.inf
        self._link: int | None = None
        self._error = ""

    @property
    def due(self) -> float:
        return self._due

    def set(self, *, wanted: bool) -> None:
        """Watch the endpoints, or end it."""
        if wanted != self._is_wanted:
            with self.changed:
                self._is_wanted, self._due = wanted, self._clock()
                self.changed.notify()

    def start(self) -> None:
        self._watch_packets(watched=False)  # an earlier agent's may have been left on
        super().start()

    def stop(self) -> None:
        super().stop()
        self._detach()

    def turn(self) -> None:
        try:
            self._turn()
            self._error = ""
        except (EbpflbError, OSError) as error:
            line = "endpoints that do not answer are not noticed: %s"
            self._error = log_once(log.error, line, in_words(error), self._error)
            self._again(RETRY_SECONDS)

    def _turn(self) -> None:
        if not self._is_wanted:
            self._detach()
            self._again(math.inf)
            return
        if self._link is None:
            self._attach()
        outcomes = tuple(self._read())
        if outcomes:
            self._put(Outcomes(outcomes))
        self._again(READ_SECONDS)

    def _again(self, seconds: float) -> None:
        with self.changed:
            is_asked = (self._link is None) == self._is_wanted and not self._error
            self._due = self._clock() + (0.0 if is_asked else seconds)

    def _attach(self) -> None:
        """Attach the program; counts of an earlier agent do not matter any more."""
        counts = self._maps[MAP]
        counts.delete([key for key, _ in counts.items()])
        compiled = compiler.compile_source(precompile.SOCKET_OPENING, cache=self._cache)
        (program,) = loader.load(compiled, self._maps)
        with (
            bpf.closing(program.fd),
            bpf.closing(os.open(self._cgroup, os.O_RDONLY | os.O_DIRECTORY)) as cgroup,
        ):
            self._link = bpf.link_create(program.fd, cgroup, program.attach_type)
        self._watch_packets(watched=True)
        log.info("endpoints that do not answer are noticed and set aside")

    def _detach(self) -> None:
        if self._link is not None:
            self._watch_packets(watched=False)
            os.close(self._link)
            self._link = None

    def _watch_packets(self, *, watched: bool) -> None:
        """Have the programs at the devices note connections, or not (bpf/path/attempt.h)."""
        gate = self._maps["flow_gate"]
        assert isinstance(gate, MappedArray)
        gate.memory[_SWITCH_AT : _SWITCH_AT + _SWITCH.size] = _SWITCH.pack(watched)

    def _read(self) -> list[Outcome]:
        """Return and clear what matters, at most MOST_OUTCOMES, drawn at random."""
        counted = [
            ServiceBackend(*key)
            for keys, values in self._maps[MAP].slices()
            for key, (third, has_opened) in zip(
                _KEY.iter_unpack(keys), _COUNTED.iter_unpack(values), strict=True
            )
            if third or has_opened
        ]
        random.shuffle(counted)
        found = (self._take(key) for key in islice(counted, MOST_OUTCOMES))
        return [outcome for outcome in found if outcome]

    def _take(self, key: ServiceBackend) -> Outcome | None:
        """Clear the counts of a backend; None if it is gone.

        After failures an entry stays: only with it the programs note that a connection opens.
        """
        counted: BackendHealth | None = self._maps[MAP].get(key)
        if counted is None:
            return None
        if counted.third:
            self._maps[MAP].replace(key, BackendHealth())
        else:
            self._maps[MAP].delete([key])
        slot = self._maps["backend_slots"].get(key.backend)
        backend = self._maps["slots"].get(slot) if slot < self._maps["slots"].spec.entries else None
        name = self._maps["service_names"].get(key.service)
        if backend is None or (backend.service, backend.id) != key or name is None:
            return None
        port = name._replace(protocol=Protocol(name.protocol), family=Family(name.family))
        place = backend.address, backend.port
        return Outcome(port, place, bool(counted.has_opened), bool(counted.third))


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
        return {
            service_name(port, 0): set_aside_in_words(self._cluster.set_aside(port))
            for port in ports
        }

    def take(self, message: Outcomes) -> None:
        """Apply what the programs have counted."""
        for outcome in message.outcomes:
            if ready := self._ready(outcome.port):
                self._apply(outcome, ready)

    def turn(self) -> None:
        """Bring endpoints back whose time has ended; forget those that are not ready."""
        self.watching = bool(self._cluster.with_passive_health)
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


def set_aside_in_words(aside: Iterable[Place]) -> str:
    """Return the endpoints, or some of many."""
    return ", ".join(sorted(host_port(*place) for place in islice(aside, MAX_LISTED)))
