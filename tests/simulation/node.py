# SPDX-License-Identifier: Apache-2.0
"""One node of a simulation: agents start and end, and steps happen while they wait or write.

Everything runs in one thread and by a virtual clock. When the agent's loop asks its inbox for a
message, steps happen until there is one, or the time is over. When the agent changes something in
the kernel, look-ups happen before, during and after the change, or it fails, or the agent dies.
"""

import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import Any

from ebpflb.agent.loop import Stop
from ebpflb.errors import EbpflbError, KernelError
from ebpflb.kernel.node.device_watch import DevicesChanged
from ebpflb.kernel.programs.loader import SECTIONS
from ebpflb.model.devices import Device
from ebpflb.model.events import Drift
from ebpflb.serve.metrics import Metrics
from tests.simulation import bpffs, settled
from tests.simulation.agent import RUN, SPECS, SYNC_PERIOD, Life, simulated
from tests.simulation.build import Library
from tests.simulation.clients import Clients
from tests.simulation.cluster import Cluster
from tests.simulation.doctor import Doctor
from tests.simulation.expected import Wrong
from tests.simulation.happenings import Happenings
from tests.simulation.kernel import SimKernel, SimMap
from tests.simulation.oracle import Known, View
from tests.simulation.places import FAMILIES, NODE_ADDRESS, of_family
from tests.simulation.steps import Step
from tests.simulation.tracked import TrackedFlows
from tests.simulation.translations import SimTable
from tests.simulation.workers import Workers

CONNECT4 = SECTIONS["cgroup/connect4"].attach_type
ERRNOS = (errno.ENOMEM, errno.E2BIG, errno.EPERM)
SETTLING = 9.0  # virtual seconds: a comparison of the maps, and a write that is tried again
LONGEST_SETTLING = 10.0  # more of them, of what is told by an API server
UNTIL_LISTED = 40.0  # more of them, where a watch has lost an event: until the next list
MOST_TURNS = 400  # turns of the loop without time passing


class Death(BaseException):
    """The agent is killed; nothing is cleaned up."""


class SimNode:
    """``run`` executes the steps; a failed check is raised as Wrong."""

    def __init__(
        self,
        library: Library,
        folder: Path,
        metrics: Metrics,
        steps: list[Step],
        happenings: Callable[["SimNode"], Happenings] = Happenings,
    ) -> None:
        self.steps = deque(steps)
        self.kernel = SimKernel(library, self.change)
        self.state = bpffs.root(self.kernel)
        self.library, self.folder, self.metrics = library, folder, metrics
        self.cgroup = os.stat(folder).st_ino
        shutil.rmtree(folder / RUN, ignore_errors=True)
        (folder / RUN).mkdir()
        self.cluster = Cluster()
        self.clients = Clients(library)
        self.tracked = TrackedFlows(self.clients.endings, self.clock)
        library.lib.dice = 1
        self.now = 1000.0
        self.table = SimTable(self)
        self.doctor = Doctor(self)
        self.happenings = happenings(self)
        self.changes = self.turns = self.lives = 0
        self.die_at: int | None = None
        self.fail_at, self.failures, self.errno = 0, 0, 0
        self.is_dead = self.serving = self.damaged = self.detached = False
        self.settle_until: float | None = None
        self.settled_by = inf
        self.finished = False
        self.life: Life | None = None
        self.known = Known(None)
        self.views: list[View] = [{}]
        self._program: object = None
        self._used_maps: Mapping[str, SimMap] = {}
        self._restart()

    def run(self) -> None:
        with simulated(self.kernel, self.tracked, self.doctor, self.table):
            try:
                while not self.finished:
                    self._live()
            finally:
                self.kernel.close()

    # One agent

    def _restart(self) -> None:
        self.known, self.is_dead = Known(self.known), False
        self.queue: deque[Any] = deque()
        self.happenings.restart()
        self.doctor.forget()
        self.clients.endings.agent_begins()
        self.turns = 0

    def _live(self) -> None:
        self.lives += 1
        self.table.new_agent()
        failures = self.failures
        self._restart()
        try:
            self.life = Life(
                *(self.state, self.folder, self, self.metrics, self.clock, SPECS),
                self._workers,
                self._drift_found,
            )
            self.life.history.start()
            self.happenings.start()
            self.life.agent.run()
            self.life.datapath.close()
            if leaked := self.kernel.opened():
                raise Wrong(f"descriptors are still open: {leaked}")
        except Death:
            pass
        except EbpflbError as error:
            if not failures:
                raise Wrong(f"a start has failed: {error}") from error
            self.now += 1.0  # until it is started again
            self.look()
        finally:
            self._end()
        self.happenings.while_away()

    def _workers(self, maps: Any) -> Workers:
        return Workers(maps, self.clients, self.library.lib.end_peer, self.clock)

    def _drift_found(self, drifts: list[Drift]) -> None:
        self.doctor.disturb()

    def _end(self) -> None:
        """End a life: objects that only the agent's descriptors kept are gone."""
        self.life = None
        self.happenings.stop()
        self.kernel.close_descriptors()
        if self.happenings.missing - self.kernel.pins.keys():
            self.damaged = True
            self.clients.forget()
            self.tracked.forget()

    def clock(self) -> float:
        return self.now

    # The inbox

    def waiting(self, seconds: float, most: float = 0.0) -> Iterator[Any]:
        """Yield the objects that wait; no time passes meanwhile."""
        message = self.take(seconds)
        while message is not None:
            yield message
            message = self.take(0.0)

    def put(self, message: Any) -> None:
        self.queue.append(message)

    def take(self, seconds: float) -> Any:
        if seconds:
            self._between_turns()
            until = self.now + seconds
            while not self.queue:
                self._workers_turn()
                if not self._next_step(min(until, self._workers_due())) and self.now >= until:
                    return None
        if not self.queue:
            self._count_turn(waits=False)
            return None
        message = self.queue.popleft()
        self.known.take(message)
        if isinstance(message, Stop):
            self.doctor.forget()
        return message

    def _workers_turn(self) -> None:
        if self.life:
            self.life.workers.turn()

    def _workers_due(self) -> float:
        return max(self.now, self.life.workers.due) if self.life else inf

    def _next_step(self, until: float) -> bool:
        """Take the next step; return False when the time is over."""
        self._count_turn(waits=until > self.now)
        if self.steps and until > self.now:
            step = self.steps.popleft()
            self.happenings.do(step, until)
            return bool(self.queue) or self.now < until
        if not self.steps:
            self._settle()
        self.now = max(self.now, until) if not self.queue else self.now
        return bool(self.queue)

    def _count_turn(self, *, waits: bool) -> None:
        self.turns = 0 if waits else self.turns + 1
        if self.turns > MOST_TURNS:
            raise Wrong("the loop turns without waiting")

    def _settle(self) -> None:
        """Let a quiet time pass; then everything must be correct."""
        self.die_at = None
        self.failures = self.tracked.failures = 0
        again = self.life.loader.due if self.life else inf
        if self.settle_until is None or again < inf:
            self.settle_until = (again if again < inf else self.now) + SETTLING
            self.settled_by = self.settle_until + LONGEST_SETTLING
            self.settled_by += UNTIL_LISTED if self.happenings.awaits_list else 0.0
        if self.life and (self.life.workers.stale.error or self.life.audit.drift):
            self.settle_until = max(self.settle_until, self.now + SETTLING)
        if self.life and self.table.surplus(self.life):  # until the audit has removed it
            self.settle_until = max(self.settle_until, self.now + SYNC_PERIOD)
        self.happenings.deliver_all()
        if self.now > self.settled_by:
            raise Wrong("the agent is not told what is new")
        if not self.happenings.is_current:
            self.settle_until = max(self.settle_until, self.now + SETTLING)
        if self.now >= self.settle_until and not self.queue and not self.finished:
            assert self.life
            self.damaged = self.detached = False
            self.look()
            settled.check(self, self.life)
            self.finished = True
            self.queue.append(Stop())

    def _between_turns(self) -> None:
        """Check after a turn of the loop, when nothing more can be done at once."""
        assert self.life
        if self.known.complete and self.life.health.ready:
            self.doctor.all_is_written(has_canary=self.life.service_sync.has_canary)
            self._expect(self.doctor.beside(self.known.view()))
            self.serving = True
            self.clients.endings.agent_is_complete()
            self.detached = self.detached and not self._all_hooks()
        else:
            self._add_view()
        if self.serving and not (self.damaged or self.detached or self._all_hooks()):
            raise Wrong("not every hook has a program")
        self.clients.note(self.now)
        self.tracked.note()
        self.look()

    def _add_view(self) -> None:
        """Add a view: the agent's current knowledge may soon be in force."""
        if self.known.complete:
            views = self.doctor.beside(self.known.view())
            self.may_have([each for each in views if all(each is not it for it in self.views)])

    def may_have(self, views: list[View]) -> None:
        """Note views that may soon be in force."""
        self._expect([*self.views, *views])

    def _expect(self, views: list[View]) -> None:
        if len(views) != len(self.views) or views[-1] is not self.views[-1]:
            self.views = views
            self.clients.expect(views)

    # The kernel's changes

    def change(self, what: str, do: Callable[[], Any], may_fail: bool) -> Any:
        """Make the change, which may fail; before, during and after it programs look things up."""
        if self.is_dead or (self.life is None and self.finished):
            raise Death
        self.changes += 1
        if self.die_at is not None and self.changes >= self.die_at:
            self.die_at, self.is_dead = None, True
            raise Death
        if may_fail and self.failures and self.changes >= self.fail_at:
            self.failures -= 1
            self.doctor.disturb()
            raise KernelError(what, self.errno, os.strerror(self.errno))
        if not self.can_look():
            return do()
        self._add_view()
        result = self._interrupt(do)
        self.look()
        if self.life is None or self.life.netfilter.active:
            self.table.check(what, self._used_maps)
        return result

    def _interrupt(self, do: Callable[[], Any]) -> Any:
        """Make the change while a program runs, after some of its look-ups."""
        done: list[Any] = []
        lib, number = self.library.lib, self.changes
        callback = self.library.ffi.callback("void()", lambda: done.append(do()))
        lib.meanwhile, lib.until_meanwhile = callback, 1 + number % 7
        self.clients.ask_one(number, self.now)
        lib.until_meanwhile = 0
        if not done:
            done.append(do())
        return done[0]

    def can_look(self) -> bool:
        """Whether the programs are in force, and no fault makes their look-ups wrong."""
        if not self.serving or self.damaged:
            return False
        link = self.kernel.link_at(self.cgroup, CONNECT4)
        if link is None or (self.detached and not self._all_hooks()):
            if self.detached:
                return False
            raise Wrong("no program runs at connect4")
        if link.program is not self._program:
            self._program, self._used_maps = link.program, link.program.maps
            self.clients.use(link.program.maps)
        return True

    def look(self) -> None:
        if self.can_look():
            self.library.lib.now = int(self.now * 1e9)
            self.clients.ask_all(self.now)

    def _all_hooks(self) -> bool:
        hooks = [hook.attach_type for hook in SECTIONS.values()]
        return all(self.kernel.link_at(self.cgroup, hook) for hook in hooks)


def device(index: int) -> Device:
    """Return a device of the node with its address."""
    own = (ip_address(of_family(NODE_ADDRESS, version)) for version in FAMILIES)
    addresses = tuple(own) if index == 1 else ()
    return Device(index, f"eth{index}", False, True, 0, addresses, addresses)


def devices(*indexes: int) -> DevicesChanged:
    return DevicesChanged(tuple(map(device, indexes)))
