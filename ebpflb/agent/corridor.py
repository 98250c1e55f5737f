# SPDX-License-Identifier: Apache-2.0
"""The corridor: event -> picture -> plan -> apply, one turn after another.

Sources put events in the inbox from their threads; one thread takes them out, all that are there
at once. Nothing is programmed before every list is complete. Then the difference is written, and
only after it the programs are put in force: a start, an upgrade or a restart is never seen half
done. What the agent cannot write it says, keeps serving, and tries again.
"""

import gc
import logging
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ebpflb.agent.machine import Machine
from ebpflb.agent.services import Services
from ebpflb.cluster.source import Source
from ebpflb.datapath.datapath import Datapath
from ebpflb.errors import CompileError, KernelError, VerifierError
from ebpflb.model.events import Event, Trouble
from ebpflb.model.picture import Picture
from ebpflb.node import ports
from ebpflb.node.devices import DevicesChanged, Follower
from ebpflb.serve import status
from ebpflb.settings import Settings

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # for what did not fit or could not be written


class Stop:
    """The last thing in the inbox."""


Message = Event | DevicesChanged | Stop
MakeSource = Callable[[Callable[[Event], None]], Source]


class Agent:
    """One node's agent; ``run`` returns after ``stop``, leaving everything in place."""

    def __init__(self, settings: Settings, datapath: Datapath, make_source: MakeSource) -> None:
        self.settings = settings
        self.datapath = datapath
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.source = make_source(self.inbox.put)
        self.devices = Follower(self.inbox.put)
        self.picture = Picture(settings.node_name)
        self.words = status.introduce(node=settings.node_name, source=settings.source)
        self.machine = Machine(settings, datapath, self.picture, self.words)
        self.services = Services(datapath, self.picture, self.machine, self.words)
        self.stopped = False

    def run(self) -> None:
        """Raises CompileError or VerifierError where there are no programs at all to serve."""
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
        wrong = words.failed or words.unattached or words.unplaced
        return RETRY_SECONDS if wrong else None

    def _take(self, message: Message) -> None:
        match message:
            case DevicesChanged():
                self.machine.here = message
            case Trouble(source, reason):
                self.words.troubles.pop(source, None)
                if reason:
                    self.words.troubles[source] = reason
                log.warning("%s: %s", source, reason or "well again")
            case Stop():
                self.stopped = True
            case _:
                for remark in self.picture.hear(message):
                    log.warning("%s", remark)

    def _settle(self) -> None:
        if not self.picture.complete:
            return
        self.words.failed = None
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
