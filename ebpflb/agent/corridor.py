# SPDX-License-Identifier: Apache-2.0
"""The corridor: event -> picture -> plan -> apply, one turn after another.

Sources put events in the inbox from their threads; one thread takes them out, all that are there
at once. Nothing is programmed before every list is complete. Then the difference is written, and
only after it the programs are put in force: a start, an upgrade or a restart is never seen half
done. What the agent cannot write it says, keeps serving, and tries again.
"""

import gc
import logging
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ebpflb.agent.machine import Machine
from ebpflb.agent.report import Report
from ebpflb.agent.services import Services
from ebpflb.cluster.source import Source
from ebpflb.datapath.datapath import Datapath
from ebpflb.datapath.stale import Cure
from ebpflb.errors import CompileError, KernelError, VerifierError
from ebpflb.model.events import Event, Trouble
from ebpflb.model.kube_proxy import Found
from ebpflb.model.picture import Picture
from ebpflb.node import ports
from ebpflb.node.devices import DevicesChanged, Follower
from ebpflb.serve import status
from ebpflb.settings import Settings

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # for what did not fit or could not be written


class Stop:
    """The last thing in the inbox."""


Message = Event | DevicesChanged | Found | Stop
MakeSource = Callable[[Callable[[Event], None]], Source]


class Agent:
    """One node's agent; ``run`` returns after ``stop``, leaving everything in place."""

    def __init__(
        self,
        settings: Settings,
        datapath: Datapath,
        make_source: MakeSource,
        report: Report,
        cure: Cure,
    ) -> None:
        self.settings = settings
        self.datapath = datapath
        self.report = report
        self.cure = cure
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.source = make_source(self.inbox.put)
        self.devices = Follower(self.inbox.put)
        self.picture = Picture(
            settings.node_name,
            bind_address=settings.bind_address,
            serve_external_ips=settings.serve_external_ips,
        )
        self.words = status.introduce(node=settings.node_name, source=settings.source)
        self.machine = Machine(settings, datapath, self.picture, self.words)
        self.services = Services(datapath, self.picture, self.machine, self.words)
        self.stopped = False
        self.rests_until = 0.0  # of the monotonic clock

    def run(self) -> None:
        """Raises CompileError or VerifierError where there are no programs at all to serve, and
        ConfigurationError for addresses that do not fit the Node.
        """
        gc.disable()  # until everything is there: what comes at the start stays
        self._load_programs()
        first, last = self.settings.masquerade_ports
        self.words.unreserved = ports.try_to_reserve(self.settings.places.ports_file, first, last)
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
            compiled = self.datapath.load(self.settings.places.cache)
        except (CompileError, VerifierError) as error:
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
            self._speak()

    def _wait(self) -> list[Message]:
        """All that is in the inbox; waits for the first, or for the next attempt."""
        try:
            messages = [self.inbox.get(timeout=self._patience())]
        except Empty:
            return []
        while not self.inbox.empty():
            messages.append(self.inbox.get())
        return messages

    def _patience(self) -> float | None:
        """How long there is nothing to do unless a message comes."""
        words = self.words
        if words.failed or words.unattached or words.unplaced:
            return RETRY_SECONDS
        rest = self.rests_until - time.monotonic()
        return max(rest, 0.0) if self._is_behind() else None

    def _take(self, message: Message) -> None:
        match message:
            case DevicesChanged():
                self.machine.here = message
            case Trouble(source, reason):
                self.words.troubles.pop(source, None)
                if reason:
                    self.words.troubles[source] = reason
                log.warning("%s: %s", source, reason or "well again")
            case Found():
                self.words.kube_proxy = message.line
                if message.words:
                    log.warning("%s", message.words)
            case Stop():
                self.stopped = True
            case _:
                self.report.hear(message, self.picture)
                for remark in self.picture.hear(message):
                    log.warning("%s", remark)
                self.report.follow(self.picture)

    def _settle(self) -> None:
        """After a sync there is none for the minimal period (kube-proxy.md 16.2)."""
        if not self._is_behind():
            return
        self.report.queued()
        if time.monotonic() >= self.rests_until:
            self._sync()
            self.rests_until = time.monotonic() + self.settings.min_sync_period

    def _is_behind(self) -> bool:
        waiting = self.picture.touched or self.words.unplaced or not self.services.programmed
        return self.picture.complete and bool(waiting or self.machine.is_news)

    def _sync(self) -> None:
        full, begun = not self.services.programmed, time.monotonic()
        self.words.failed = None
        if full:
            self.machine.check_families()
        try:
            if self.machine.is_news:
                self.machine.write(self.services.span)
        except KernelError as error:
            self._fail(error)
        try:
            self.services.write()
            if not self.machine.attached:
                self._put_in_force()
        except KernelError as error:
            self._fail(error)
            self.services.start_over()
            self.machine.forget()
        self._tell(time.monotonic() - begun, full=full)

    def _tell(self, seconds: float, *, full: bool) -> None:
        if self.words.failed:
            self.report.failed(seconds, full=full)
            return
        services = self.services
        if full:
            self.report.checks.listen_at(self.machine.listening)
        self.report.synced(seconds, full=full, checks=services.checks, no_local=services.no_local)
        self.cure.ended(services.planner.stale.take())
        if full:
            self.cure.survey()

    def _put_in_force(self) -> None:
        self.machine.attach()
        gc.collect()
        gc.freeze()
        gc.enable()
        log.info("serving %d service ports", len(self.services.planner.present))

    def _fail(self, error: KernelError) -> None:
        self.words.failed = str(error)
        log.error("%s; trying again in %g s", error, RETRY_SECONDS)

    def _speak(self) -> None:
        words, present = self.words, self.services.planner.present
        words.complete = self.picture.complete
        words.service_ports = len(present)
        words.backends = sum(len(programmed.backends) for programmed in present.values())
        words.refused = {f"{kind} {key}": why for (kind, key), why in self.picture.refused.items()}
        status.write(self.settings.places, words)
