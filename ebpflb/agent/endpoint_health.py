# SPDX-License-Identifier: Apache-2.0
"""Endpoint health: set endpoints aside to which connections from this node fail to open.

While some Service wants it, or has its connections move (rebalance.py), a thread keeps a program
attached for the connections of sockets (bpf/hooks/socket_opening.c). For endpoint health it also
has the programs at the devices note the connections of packets (bpf/path/attempt.h), and reads the
counts every READ_SECONDS (bpf/core/endpoint_health.h). It decides by model/endpoint_health.py, and
by what the loop says of the endpoints. The attached program has no pin: it ends with the agent, as
nothing is set aside without one. Otherwise nothing is attached, and the thread sleeps.
"""

import logging
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from struct import Struct
from typing import NamedTuple

from ebpflb.agent.loop import Inbox
from ebpflb.cluster.event_recorder import object_limit
from ebpflb.entries.services import service_name
from ebpflb.errors import EbpflbError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.bpf_map import Map, MappedArray
from ebpflb.kernel.maps.layout import columns
from ebpflb.kernel.maps.records import BackendHealth, ServiceBackend
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.model.addresses import Family, host_port
from ebpflb.model.annotations import HEALTH_OFF
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoint_health import EndpointHealth, Outcome, Place
from ebpflb.model.endpoint_slices import StoredSlice
from ebpflb.model.endpoints import merge, places
from ebpflb.model.events import MAX_LISTED, Key
from ebpflb.model.facts import Fact, Observed
from ebpflb.model.services import PortName, Protocol
from ebpflb.options import Options
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)

MAP = "backend_health"
READ_SECONDS, RETRY_SECONDS = 0.5, 30.0
MOST_OUTCOMES = 64  # in one read: each may change a Service; the others stay for the next read

_KEY = Struct("=II")
_COUNTED = columns("struct backend_health", third="Q", has_opened="I")
_SET_ASIDE = (
    "endpoint {} is set aside on this node for {:g} s: three clients that had reached the Service"
    " could not open connections to it"
)


Slices = tuple[StoredSlice, ...]


class _Listed(NamedTuple):
    """The slices of a service port, and its endpoints that the API calls ready."""

    slices: Slices
    ready: frozenset[Place]


class EndpointWatch(PeriodicWorker):
    """Emits the endpoints that do not answer, after each change.

    ``record`` makes an Event about a Service. ``count``: how many endpoints are set aside now;
    ``times``: how often one was, since the start. ``clock`` is a monotonic clock, in seconds.
    """

    def __init__(
        self,
        maps: Mapping[str, Map],
        options: Options,
        cluster: ClusterState,
        inbox: Inbox,
        record: Callable[[Key, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        failing = "endpoints that do not answer are not noticed"
        super().__init__("endpoint-health", READ_SECONDS, failing=failing)
        self._maps, self._options, self._cluster = maps, options, cluster
        self._inbox, self._record, self._clock = inbox, record, clock
        self._link: int | None = None
        self._watches_packets = False
        self._rests_until = -math.inf
        self._may_warn = object_limit(clock).allows
        self._health = EndpointHealth()
        self._outcomes: list[Outcome] = []  # not applied yet
        self._listed: dict[PortName, _Listed] = {}
        self._aside = frozenset[tuple[PortName, Place]]()  # as emitted last
        self.times = 0

    @property
    def count(self) -> int:
        return len(self._aside)

    def start(self) -> None:
        self._watch_packets(watched=False)  # an earlier agent's may have been left on
        super().start()

    def stop(self) -> None:
        super().stop()
        self._detach()

    def turn(self) -> None:
        """Raises EbpflbError or OSError; the next turns then do nothing for a while."""
        if self._clock() < self._rests_until:
            return
        self.want(False)  # a Service that changes meanwhile wakes this again
        try:
            self._look()
        except (EbpflbError, OSError):
            self._rests_until = self._clock() + RETRY_SECONDS
            raise
        finally:
            if self._is_wanted or self._link is not None or self._aside:
                self.want(True)

    @property
    def _is_wanted(self) -> bool:
        return bool(self._cluster.with_passive_health or self._cluster.with_rebalance)

    def _look(self) -> None:
        if self._is_wanted and self._link is None:
            self._attach()
        elif not self._is_wanted:
            self._detach()
        has_health = bool(self._cluster.with_passive_health)
        if has_health != self._watches_packets:
            self._watch_packets(watched=has_health)
        self._outcomes += self._read() if has_health else ()
        if ports := {each.port for each in self._outcomes} | set(self._health.ports):
            with suppress(TimeoutError):  # a busy loop is asked again by the next turn
                self._apply(self._inbox.ask(lambda: {port: self._slices(port) for port in ports}))

    def _slices(self, port: PortName) -> Slices:
        """Return the port's slices; none if its endpoints' health does not matter."""
        ports = self._cluster.services.get(port.owner, ())
        is_watched = any(it.name == port and it.endpoint_health != HEALTH_OFF for it in ports)
        return self._cluster.slices_for(port.owner) if is_watched else ()

    def _apply(self, listed: Mapping[PortName, Slices]) -> None:
        """Apply the counts of these service ports."""
        self._listed = {port: self._ready(port, slices) for port, slices in listed.items()}
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            self._take_outcome(outcome, self._listed[outcome.port].ready)
        for port, its in self._listed.items():
            self._health.keep(port, its.ready, self._clock())
        every = ((port, place) for port in listed for place in self._health.set_aside(port))
        if (aside := frozenset(every)) != self._aside:
            for port, place in self._aside - aside:
                if self._may_warn(port.owner):
                    log.info("Service %s: endpoint %s is used again", port, host_port(*place))
            self._aside = aside
            self._inbox.put(Observed(Fact.FAILING_ENDPOINTS, aside))

    def _take_outcome(self, outcome: Outcome, ready: frozenset[Place]) -> None:
        port, place = outcome.port, outcome.place
        if outcome.has_opened:
            self._health.opens(port, place)
        if not outcome.has_failed:
            return
        if seconds := self._health.fails(port, place, ready, self._clock()):
            self.times += 1
            note = _SET_ASIDE.format(host_port(*place), seconds)
            if self._may_warn(port.owner):
                log.warning("Service %s: %s", port, note)
                self._record(port.owner, note)

    def _ready(self, port: PortName, slices: Slices) -> _Listed:
        """Return the endpoints that the API calls ready; many are merged after a change only."""
        former = self._listed.get(port)
        if former and former.slices == slices:
            return former
        found = merge(slices, port, self._cluster.node_name)
        return _Listed(slices, places(each for each in found if each.ready and each.weight))

    def _attach(self) -> None:
        """Attach the program; counts of an earlier agent do not matter any more."""
        counts = self._maps[MAP]
        counts.delete([key for key, _ in counts.items()])
        compiled = compiler.compile_source(
            precompile.SOCKET_OPENING, cache=self._options.paths.cache
        )
        (program,) = loader.load(compiled, self._maps)
        with bpf.closing(program.fd), cgroup_links.opened(self._options.cgroup) as cgroup:
            self._link = bpf.link_create(program.fd, cgroup, program.attach_type)
        log.info("watching for endpoints that do not answer")

    def _detach(self) -> None:
        if self._watches_packets:
            self._watch_packets(watched=False)
        if self._link is not None:
            os.close(self._link)
            self._link = None

    def _watch_packets(self, *, watched: bool) -> None:
        """Have the programs at the devices note connections, or not (bpf/path/attempt.h)."""
        gate = self._maps["flow_gate"]
        assert isinstance(gate, MappedArray)
        gate.write_field(0, "endpoint_health", int(watched))
        self._watches_packets = watched

    def _read(self) -> list[Outcome]:
        """Return and clear at most MOST_OUTCOMES counts that matter, drawn at random."""
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
        """Return and clear a backend's counts; None if it is gone.

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


def set_aside_in_words(cluster: ClusterState) -> dict[str, str]:
    """Return service port -> endpoints that are set aside: at most MAX_LISTED of each."""
    return {
        service_name(port, 0): ", ".join(
            sorted(host_port(*place) for place in islice(cluster.aside[port], MAX_LISTED))
        )
        for port in islice(cluster.aside, MAX_LISTED)
    }
