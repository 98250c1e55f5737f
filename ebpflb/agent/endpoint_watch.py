# SPDX-License-Identifier: Apache-2.0
"""Read what the programs count about endpoints that do not answer (bpf/core/endpoint_health.h).

While some Service wants it, a thread keeps a program attached for the connections of sockets
(bpf/hooks/socket_opening.c), has the programs at the devices note the connections of packets
(bpf/path/attempt.h), and reads the counts every READ_SECONDS. The attached program has no pin: it
ends with the agent, as nothing is set aside without one. Otherwise nothing is attached or read.
"""

import logging
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from struct import Struct

from ebpflb.errors import EbpflbError, in_words, log_once
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.bpf_map import Map, MappedArray
from ebpflb.kernel.maps.layout import columns, ffi
from ebpflb.kernel.maps.records import BackendHealth, ServiceBackend
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.model.addresses import Family
from ebpflb.model.endpoint_health import Outcome, Outcomes
from ebpflb.model.services import Protocol
from ebpflb.workers import DueWorker

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
