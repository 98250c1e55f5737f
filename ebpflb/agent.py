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
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from ebpflb.cluster.source import Source
from ebpflb.datapath.datapath import CAPACITY, Datapath
from ebpflb.errors import CompileError, KernelError, VerifierError
from ebpflb.model import devices, nodeports, nodes
from ebpflb.model.events import Event, Key, Kind, Trouble
from ebpflb.model.picture import Picture
from ebpflb.model.services import PortName
from ebpflb.node import ports
from ebpflb.node.devices import DevicesChanged, Follower
from ebpflb.plan.local import Local
from ebpflb.plan.plan import Plan
from ebpflb.plan.planner import Planner
from ebpflb.plan.spans import service_range
from ebpflb.plan.wanted import Wanted, want
from ebpflb.serve import status
from ebpflb.settings import Settings

log = logging.getLogger(__name__)

BATCH = 250  # services a plan: a plan for all of 10,000 would hold every entry twice
RETRY_SECONDS = 1.0  # for what did not fit or could not be written


class Stop:
    """The last thing in the inbox."""


Message = Event | DevicesChanged | Stop
MakePlan = Callable[[Mapping[PortName, Wanted | None], float], Plan]
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
        self.here = DevicesChanged(())
        self.written: object = None  # what the maps and programs of this node follow
        self.planner = Planner(CAPACITY, datapath.present())
        self.names: dict[Key, set[PortName]] = {}
        self.programmed = False
        self.words = status.introduce(node=settings.node_name, source=settings.source)

    def run(self) -> None:
        """Raises CompileError or VerifierError where there are no programs at all to serve."""
        gc.disable()  # until everything is there: what comes at the start stays
        self._load_programs()
        first, last = self.settings.masquerade_ports
        self.words.unreserved = ports.try_to_reserve(self.settings.places.ports_file, first, last)
        self.devices.start()
        self.source.start()
        while self._turn():
            pass
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

    def _turn(self) -> bool:
        messages = self._wait()
        for message in messages:
            self._take(message)
        if any(isinstance(message, Stop) for message in messages):
            return False
        self._settle()
        self._speak()
        return True

    def _wait(self) -> list[Message]:
        """All that is in the inbox; waits for the first, or for the next attempt."""
        wrong = self.words.failed or self.words.unattached or self.planner.unplaced
        again = RETRY_SECONDS if wrong else None
        try:
            messages = [self.inbox.get(timeout=again)]
        except Empty:
            return []
        while not self.inbox.empty():
            messages.append(self.inbox.get())
        return messages

    def _take(self, message: Message) -> None:
        match message:
            case DevicesChanged():
                self.here = message
            case Trouble(source, reason):
                self.words.troubles.pop(source, None)
                if reason:
                    self.words.troubles[source] = reason
                log.warning("%s: %s", source, reason or "well again")
            case Stop():
                pass
            case _:
                for remark in self.picture.hear(message):
                    log.warning("%s", remark)

    def _settle(self) -> None:
        if not self.picture.complete:
            return
        self.words.failed = None
        try:
            self._write_node()
        except KernelError as error:
            self._fail(error)
        try:
            self._write_services(self.picture.take_touched())
        except KernelError as error:
            self._fail(error)
            self._start_over()

    def _write_node(self) -> None:
        """What this machine and its Node are, where that is news."""
        ranges = self.picture.service_cidrs if Kind.SERVICE_CIDR in self.picture.listed else None
        found = self.here, self.picture.node, ranges
        if found == self.written and not self.words.unattached:
            return
        choice, local = self.settings.nodeport_addresses, self._local()
        serving = nodeports.serving(self.here.addresses, choice, self.picture.primary)
        self.datapath.hold("node_addresses", dict.fromkeys(serving, 1))
        self.datapath.hold("devices", local.devices())
        if ranges is not None:
            self.planner.cover(ranges)
            self.datapath.hold("service_ranges", dict.fromkeys(map(service_range, ranges), 1))
        self._write_settings()
        if self.programmed and self.datapath.programs:
            self._report_unattached(self.datapath.follow(local.served))
        self.written = found

    def _local(self) -> Local:
        node, every = self.picture.node, self.here.devices
        served = devices.served(every, self.settings.devices)
        pod_cidrs = nodes.pod_cidrs(node) if node else ()
        return Local(every, served, self.picture.primary, self.settings.detector, pod_cidrs)

    def _write_settings(self) -> None:
        """The span covers all that is planned: before that is written."""
        self.datapath.set(self._local().settings(self.settings.fields, self.planner.span))

    def _write_services(self, touched: set[Key]) -> None:
        keys = sorted(touched)
        for start in range(0, len(keys), BATCH):
            self._write_batch(keys[start : start + BATCH], self.planner.change)
        if self.planner.unplaced or not self.programmed:
            self._write_batch([], self.planner.change if self.programmed else self.planner.complete)
        self._report_unplaced()
        if not self.programmed:
            self._put_in_force()

    def _write_batch(self, keys: list[Key], make_plan: MakePlan) -> None:
        changes = {name: wanted for key in keys for name, wanted in self._wanted(key)}
        began = time.monotonic()
        plan = make_plan(changes, began)
        planned = time.monotonic()
        if plan:
            self._write_settings()
            self.datapath.apply(plan)
            spent = (planned - began) * 1e3, (time.monotonic() - planned) * 1e3
            log.info("%r planned in %.1f ms, written in %.1f ms", plan, *spent)
        self.planner.applied(time.monotonic())

    def _wanted(self, key: Key) -> list[tuple[PortName, Wanted | None]]:
        """What a service's ports want now; None for ports that it no longer has."""
        primary = self.picture.primary
        wanted = [want(port, selection, primary) for port, selection in self.picture.ports(key)]
        former = self.names.get(key, set())
        self.names[key] = {each.name for each in wanted}
        if not wanted:
            del self.names[key]
        for each in wanted:
            if each.remark and each.name not in former:
                log.warning("Service %s: %s", each.name, each.remark)
        gone = [(name, None) for name in former - {each.name for each in wanted}]
        return [*gone, *((each.name, each) for each in wanted)]

    def _put_in_force(self) -> None:
        if self.datapath.programs:
            failed = self.datapath.attach(self.settings.cgroup, self._local().served)
            self._report_unattached(failed)
        self.programmed = True
        gc.collect()
        gc.freeze()
        gc.enable()
        log.info("serving %d service ports", len(self.planner.present))

    def _report_unplaced(self) -> None:
        now = {str(name): reason for name, reason in self.planner.unplaced.items()}
        line = "Service %s: %s; its last good state stays"
        self.words.unplaced = status.renew(self.words.unplaced, now, line)

    def _report_unattached(self, now: dict[str, str]) -> None:
        line = "device %s: %s; its packets are not served"
        self.words.unattached = status.renew(self.words.unattached, now, line)

    def _fail(self, error: KernelError) -> None:
        self.words.failed = str(error)
        log.error("%s; trying again in %g s", error, RETRY_SECONDS)

    def _start_over(self) -> None:
        """After a failed write only the maps know what they hold: read them, and plan anew."""
        self.planner = Planner(CAPACITY, self.datapath.present())
        self.written = None
        self.names.clear()
        self.programmed = False
        self.picture.touched |= self.picture.services.keys()

    def _speak(self) -> None:
        words, present = self.words, self.planner.present
        words.complete = self.picture.complete
        words.service_ports = len(present)
        words.backends = sum(len(programmed.backends) for programmed in present.values())
        words.refused = {f"{kind} {key}": why for (kind, key), why in self.picture.refused.items()}
        status.write(self.settings.places, words)
