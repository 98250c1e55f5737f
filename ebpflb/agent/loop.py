# SPDX-License-Identifier: Apache-2.0
"""The loop: event -> cluster state -> plan -> apply, one turn after another.

Sources put events in the inbox from their threads; one thread takes them out, all that are there
at once. Nothing is programmed before every list is complete. Then the difference is written, and
only after it the programs are put in force: a start, an upgrade or a restart is never seen half
done. What the agent cannot write it says, keeps serving, and tries again.
"""

import gc
import logging
import math
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ebpflb.agent.node_sync import Machine
from ebpflb.agent.parts import do_all
from ebpflb.agent.reporter import Reporter
from ebpflb.agent.service_sync import Services
from ebpflb.cluster.source import Source
from ebpflb.datapath.datapath import Datapath
from ebpflb.errors import CompileError, KernelError, VerifierError
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Event, SourceStatus
from ebpflb.model.kube_proxy import Detection
from ebpflb.node import reserved_ports
from ebpflb.node.device_watch import DevicesChanged, DeviceWatch
from ebpflb.options import Options
from ebpflb.serve import status
from ebpflb.stale_udp.worker import Cure

log = logging.getLogger(__name__)

WRITE_RETRY_SECONDS = 1.0  # for what did not fit or could not be written


class Stop:
    """The last thing in the inbox."""


Message = Event | DevicesChanged | Detection | Stop
MakeSource = Callable[[Callable[[Event], None]], Source]


class Agent:
    """One node's agent; ``run`` returns after ``stop``, leaving everything in place."""

    def __init__(
        self,
        options: Options,
        datapath: Datapath,
        make_source: MakeSource,
        reporter: Reporter,
        cure: Cure,
    ) -> None:
        self.options = options
        self.datapath = datapath
        self.reporter = reporter
        self.cure = cure
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.source = make_source(self.inbox.put)
        self.devices = DeviceWatch(self.inbox.put)
        self.cluster = ClusterState(
            options.node_name,
            bind_address=options.bind_address,
            serve_external_ips=options.serve_external_ips,
        )
        self.words = status.introduce(node=options.node_name, source=options.source)
        self.machine = Machine(options, datapath, self.cluster, self.words)
        self.services = Services(datapath, self.cluster, self.machine, self.words)
        self.stopped = False
        self.settled = False  # the last sync wrote all that there was, and nothing failed since
        self.ended = -math.inf  # the last sync, of the monotonic clock
        self.restores_at = time.monotonic() + options.sync_period
        self.said = b""

    def run(self) -> None:
        """Raises CompileError, VerifierError or KernelError where there are no programs at all to
        serve, and ConfigurationError for addresses that do not fit the Node.
        """
        self._load_programs()
        first, last = self.options.masquerade_ports
        self.words.unreserved = reserved_ports.try_to_reserve(
            self.options.paths.ports_file, first, last
        )
        self.devices.start()
        self.source.start()
        while not self.stopped:
            self._turn()
        self.source.stop()
        log.info("stopped; what is programmed serves on")

    def stop(self) -> None:
        """Safe to call from a signal handler."""
        self.inbox.put(Stop())

    def _load_programs(self) -> None:
        try:
            compiled = self.datapath.load(self.options.paths.cache)
        except (CompileError, VerifierError, KernelError) as error:
            if not self.datapath.serves():
                raise
            self.words.programs = f"old ones: {str(error).splitlines()[0]}"
            log.error("%s\nthe old programs keep serving", error)
        else:
            log.info("programs %s", "compiled" if compiled else "from the cache")

    def _turn(self) -> None:
        for message in self._wait():
            self._take(message)
        if not self.stopped:
            self._settle()
            self._restore()
            self._speak()
            if self.machine.attached and not gc.isenabled():
                self._keep()

    def _keep(self) -> None:
        """What came at the start stays: garbage is looked for in what comes later."""
        gc.collect()
        gc.freeze()
        gc.enable()

    def _wait(self) -> list[Message]:
        """All that is in the inbox; waits for the first, or for the next attempt."""
        try:
            messages = [self.inbox.get(timeout=self._patience())]
        except Empty:
            return []
        while not self.inbox.empty():
            messages.append(self.inbox.get())
        return messages

    def _patience(self) -> float:
        """How long there is nothing to do unless a message comes."""
        return max(min(self._due(), self.restores_at) - time.monotonic(), 0.0)

    def _take(self, message: Message) -> None:
        match message:
            case DevicesChanged():
                self.machine.here = message
            case SourceStatus(source, error):
                self.words.troubles.pop(source, None)
                if error:
                    self.words.troubles[source] = error
                log.warning("%s: %s", source, error or "recovered")
            case Detection():
                self.words.kube_proxy = message.message
                if message.log_message:
                    log.warning("%s", message.log_message)
            case Stop():
                self.stopped = True
            case _:
                applied = self.cluster.apply(message)
                for warning in applied.warnings:
                    log.warning("%s", warning)
                self.reporter.applied(applied, self.cluster.node)

    def _settle(self) -> None:
        """After a sync there is none for the minimal period (kube-proxy.md 16.2)."""
        behind = self._is_behind()
        if behind:
            self.reporter.sync_queued()
        if time.monotonic() >= self._due():
            self._sync(heard=behind)
            self.ended = time.monotonic()

    def _is_behind(self) -> bool:
        """Whether anything waits that has been heard."""
        waiting = self.cluster.changed_services or self.machine.is_news or not self.settled
        return self.cluster.complete and bool(waiting)

    def _due(self) -> float:
        """When there is to be a sync next, of the monotonic clock."""
        words = self.words
        if self._is_behind() and not words.failed:
            return self.ended + self.options.min_sync_period
        lacking = words.failed or words.unattached or words.unplaced
        return self.ended + WRITE_RETRY_SECONDS if lacking else math.inf

    def _sync(self, *, heard: bool) -> None:
        """Writes what was heard, and tries again what could not be done.

        A part that cannot be written keeps no other back, but the programs wait for all.
        """
        full, begun = not self.settled, time.monotonic()
        if full and not self.words.failed:
            self.machine.check_families()
        try:
            do_all([self._write_machine, self.services.write])
            if not self.machine.attached:
                self._put_in_force()
        except KernelError as error:
            self._fail(error)
            self.reporter.sync_failed(time.monotonic() - begun, full=full)
        else:
            self.settled, self.words.failed = True, None
            self._tell(time.monotonic() - begun, full=full, heard=heard)

    def _write_machine(self) -> None:
        if self.machine.is_news or self.words.unattached or not self.settled:
            self.machine.write(self.services.span)

    def _put_in_force(self) -> None:
        self.machine.attach()
        log.info("serving %d service ports", len(self.services.planner.actual))

    def _tell(self, seconds: float, *, full: bool, heard: bool) -> None:
        """Another try for what lacks is no sync to others (kube-proxy.md 16.7 has the order)."""
        services = self.services
        if heard:
            self.reporter.synced(
                seconds,
                full=full,
                checks=services.checks,
                listening=self.machine.listening,
                no_local=services.no_local,
            )
        self.cure.ended(services.planner.stale.take())
        if full:
            self.cure.survey()

    def _restore(self) -> None:
        """Nobody tells us that others took programs off a device: it is looked for."""
        if time.monotonic() < self.restores_at:
            return
        self.restores_at = time.monotonic() + self.options.sync_period
        try:
            self.machine.restore()
        except KernelError as error:
            self._fail(error)

    def _fail(self, error: KernelError) -> None:
        if str(error) != self.words.failed:
            log.error("%s; trying again every %g s", error, WRITE_RETRY_SECONDS)
        self.settled, self.words.failed = False, str(error)

    def _speak(self) -> None:
        words, planner = self.words, self.services.planner
        words.complete = self.cluster.complete
        words.service_ports = len(planner.actual)
        words.backends = planner.backends
        words.refused = {f"{kind} {key}": why for (kind, key), why in self.cluster.invalid.items()}
        self.said = status.write(self.options.paths, words, self.said)
