# SPDX-License-Identifier: Apache-2.0
"""The packet programs at this node's devices: one or two at each device, replaced in place.

They are attached by tcx links if the kernel supports them, else by clsact filters. A device whose
packets have no link header gets another variant of the programs. The program at egress is attached
only while it is wanted. Ingress opens flows and egress translates their replies, often at another
device. So egress is attached to a device before ingress, and ingress is detached everywhere before
egress; whether all devices have egress is ``has_egress``.

Besides: the removal of a whole state directory.
"""

import errno
import logging
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import NamedTuple

from ebpflb.errors import EbpflbError, KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links, tcx, uplink_program
from ebpflb.kernel.attach.cgroup_links import HeldLinks, Pinned
from ebpflb.kernel.attach.clsact import NO_FILTERS, Clsact
from ebpflb.kernel.attach.tcx import Tcx
from ebpflb.kernel.maps.state_dir import StateDir, remove_tree
from ebpflb.kernel.programs.loader import Program
from ebpflb.model.devices import KINDS_OF_PODS, Device, Devices
from ebpflb.model.events import Drift
from ebpflb.workers import StepWorker

# Remove one state directory: attachments first, so that no program runs with only half of the maps.


def unpin_all(state: StateDir) -> None:
    """Remove the state directory. Raises KernelError.

    Filters are removed only from devices of the caller's network namespace.
    """
    if not state.directory.is_dir():
        return
    for each in uplink_program.ALL:
        each.remove(state)
    for attacher in (Clsact(state.devices_directory), Tcx(state.devices_directory)):
        attacher.detach(attacher.recorded())
    for pin in state.links():
        tcx.detach(pin)
    for directory in (state.devices_directory, state.links_directory, state.directory):
        remove_tree(directory)


log = logging.getLogger(__name__)

Load = Callable[[bool], list[Program]]
_REMOVED = "programs were removed from device %s: attaching them again"
_INGRESS, _EGRESS = ("ingress",), ("egress",)
_ATTACH_ORDER = (*_EGRESS, *_INGRESS)
GROUP = 16  # devices that get programs together, most important first
# How long the device of a new pod has no clsact. With it the CNI plugin bandwidth, which creates a
# qdisc ingress there, would fail, and the pod with it (containernetworking/plugins#894).
PLUGIN_SECONDS = 2.0
_STEP_SECONDS = 0.05


Attacher = Tcx | Clsact  # their attachments outlive the agent


def attacher(state: StateDir) -> Attacher:
    """Return the attacher for the way that this kernel supports."""
    return Tcx(state.devices_directory) if tcx.works() else Clsact(state.devices_directory)


class DevicePrograms:
    """The programs of this agent at the devices.

    ``load`` returns those for devices with, or without, a link header. The kernel takes 8 to 30 ms
    to attach the first programs to a device by tcx, whatever the number of threads: it waits for an
    RCU grace period with the lock of all devices held. So a worker thread attaches them, and calls
    ``on_attached`` after each of its groups; without ``on_attached`` the caller's thread does it
    all.
    """

    def __init__(
        self,
        state: StateDir,
        load: Load,
        held: HeldLinks | None = None,
        on_attached: Callable[[], None] | None = None,
    ) -> None:
        self.load = load
        self.attacher = attacher(state)
        self.held = HeldLinks() if held is None else held
        self.attached: set[int] = set()  # devices that have this agent's program at ingress
        self._with_egress: set[int] = set()  # devices that have this agent's program at egress
        self.egress = True  # whether ``update`` attaches it, or removes it
        self.to_come: set[int] = set()  # devices that the worker still has to serve
        self.failed: dict[str, str] = {}  # device -> why the last attempt has failed
        self._on_attached = on_attached
        self.worker = StepWorker("attach")
        # What ``_attach`` has returned for the devices served since the last ``take_attached``.
        self._results: deque[tuple[Device, str, str | None]] = deque()
        self._recorded = self.attacher.recorded()  # devices that may have our programs
        self._recorded_egress = self.attacher.recorded(_EGRESS)  # that may have it, whosever it is
        self.lack_egress: set[int] = set()  # devices to which the worker still attaches it
        self._known: dict[int, Device] = {}  # devices as they were at the last ``update``
        self._earliest: dict[int, float] = {}  # device to come -> when it may get programs
        self._faulty: set[int] = set()  # attached devices at which ``faults`` found something
        self._ids: dict[bool, dict[str, int]] = {}  # of the programs, by whether for a link header

    @property
    def recorded(self) -> Collection[int]:
        """The devices, by ifindex, that may have programs, of this agent or an earlier one."""
        return self._recorded

    @property
    def has_egress(self) -> bool:
        """Whether all devices have the program at egress that can have it."""
        return self.egress and not self.lack_egress

    def update(self, wanted: Devices, now: Collection[int] | None = None) -> dict[str, str]:
        """Attach the programs to these devices and no others; return device -> error.

        Only devices that have changed are checked for the programs; ``faults`` checks all.
        ``now``: indexes of devices that must have programs before this returns, such as those that
        an earlier agent served; None: all. The worker serves the others in order, GROUP at a time:
        see ``take_attached``. It also attaches ``egress`` to devices that have served without, and
        removes it.
        """
        self.worker.halt()
        self.take_attached()
        is_first = not self._known
        self._detach_others({device.index for device in wanted})
        self._forget_removed(wanted)
        self.failed.clear()
        new = [device for device in wanted if device.index not in self.attached]
        later = self._later(new, now)
        self._recorded.update(device.index for device in new)
        self._attach_now([device for device in new if device not in later])
        self._let_plugins_begin(() if is_first else later)
        self._begin(later, wanted)
        return dict(self.failed)

    def _later(self, new: list[Device], now: Collection[int] | None) -> list[Device]:
        """Return the devices that wait for the worker; the kernel replaces programs at once."""
        if now is None or self._on_attached is None or not new:
            return []
        at_once = (self._recorded - self.to_come).union(now)
        return [device for device in new if device.index not in at_once]

    def _attach_now(self, devices: list[Device]) -> None:
        for _ in self._steps(devices):
            pass
        self.take_attached()

    def _let_plugins_begin(self, later: Collection[Device]) -> None:
        """Note until when new pods' devices wait; with tcx no device has to wait."""
        until = time.monotonic() + PLUGIN_SECONDS
        self._earliest = {
            device.index: self._earliest.get(device.index, until)
            for device in later
            if device.kind in KINDS_OF_PODS and isinstance(self.attacher, Clsact)
        }

    def _begin(self, later: list[Device], wanted: Devices) -> None:
        """Let the worker serve these devices, and give egress to others, or take it from all."""
        self.to_come = {device.index for device in later}
        self.lack_egress, surplus = set(), set[int]()
        if self.egress:
            self.lack_egress = self.to_come | (self.attached - self._with_egress)
        else:
            surplus = set(self._recorded_egress)
            self._with_egress.clear()
        # First, so that ``held`` does not restore them.
        self.held.release(pin for index in surplus for pin in self.attacher.pins(index, _EGRESS))
        due = [it for it in wanted if it.index in self.to_come | self.lack_egress]
        ready = [device for device in due if device.index not in self._earliest]
        groups = [ready[at : at + GROUP] for at in range(0, len(ready), GROUP)]
        waiting = [[device] for device in due if device.index in self._earliest]
        steps = chain(self._steps_of(groups), self._detach_egress(surplus), self._steps_of(waiting))
        if not self._on_attached:
            deque(steps, maxlen=0)
            self.take_attached()
        elif due or surplus:
            self.worker.begin(steps)

    def _detach_egress(self, surplus: Collection[int]) -> Iterator[None]:
        for index in surplus:
            self.attacher.detach_egress(index)
            self._recorded_egress.discard(index)
            yield

    def _steps_of(self, groups: list[list[Device]]) -> Iterator[None]:
        for group in groups:
            while time.monotonic() < self._earliest.get(group[0].index, -math.inf):
                time.sleep(_STEP_SECONDS)
                yield
            yield from self._steps(group)
            if self._on_attached:
                self._on_attached()

    def _steps(self, devices: list[Device]) -> Iterator[None]:
        """Attach the programs that are missing: egress at all of the devices, then ingress.

        A device for programs that may have to be loaded first comes last.
        """
        left = sorted(devices, key=lambda device: not device.link_header)
        for hook in _ATTACH_ORDER if self.egress else _INGRESS:
            served = []
            for device in left:
                if hook == "ingress" and device.index in self.attached:
                    continue
                error = self._attach(device, hook)
                self._results.append((device, hook, error))
                if error is None:
                    served.append(device)
                yield
            left = served

    def take_attached(self) -> dict[str, str]:
        """Note what has been attached since the last call; return all devices -> error."""
        while self._results:
            device, hook, error = self._results.popleft()
            if not error or device.index not in self.attached:
                self.lack_egress.discard(device.index)
            if hook == "ingress" or error is not None:
                self.to_come.discard(device.index)
            if error:
                self.failed[device.name] = error
            elif error is None and self._known.get(device.index) == device:
                (self._with_egress if hook == "egress" else self.attached).add(device.index)
                self.held.hold(self.attacher.pins(device.index, (hook,)))
                log.debug("%s attached to %s by %s", hook, device.name, self.attacher.name)
        return dict(self.failed)

    def forget(self) -> None:
        """Let the next ``update`` attach to all devices: their programs are about to be closed."""
        self.worker.halt()
        self.take_attached()
        self.attached.clear()
        self._with_egress.clear()
        self._ids.clear()

    def close(self) -> None:
        """End the worker; what is attached stays."""
        self.worker.stop()

    def restore(self, wanted: Devices) -> dict[str, str]:
        """Like ``update``, but also attach again where ``faults`` found something."""
        self.attached -= self._faulty
        self._with_egress -= self._faulty
        self._faulty.clear()
        return self.update(wanted, {device.index for device in wanted} - self.to_come)

    def faults(self, wanted: Devices) -> Iterator[list[Drift]]:
        """Yield the faults at each device that has programs of this agent, device by device.

        A device that is removed meanwhile has no faults: the device watch will report the removal.
        """
        pinned = self.held.pinned(self.attacher.folder)
        for device in wanted:
            yield self._faults(device, pinned) if device.index in self.attached else []

    def _detach_others(self, wanted: set[int]) -> None:
        if others := self._recorded - wanted:
            # First, so that the watch of pins knows that this process removes them.
            self.held.release(pin for index in others for pin in self.attacher.pins(index))
            self.attacher.detach(others)
            self._recorded -= others
            self._recorded_egress -= others

    def _faults(self, device: Device, pinned: Pinned) -> list[Drift]:
        expected = self._expected(device)
        found = list(self.attacher.faults(device, expected, self.held, pinned))
        if not found or not _exists(device.index):
            return []
        self._faulty.add(device.index)
        return found

    def _expected(self, device: Device) -> dict[str, int]:
        """Return hook -> id of the program that should be there."""
        kind = device.link_header
        hooks = _ATTACH_ORDER if device.index in self._with_egress else _INGRESS
        if not self._ids.get(kind, {}).keys() >= {*hooks}:
            programs = self.load(kind)
            self._ids[kind] = {p.name: int(bpf.info(p.fd, "prog_info").id) for p in programs}
        return {hook: self._ids[kind][hook] for hook in hooks}

    def _forget_removed(self, wanted: Devices) -> None:
        """Forget devices that are gone, and those whose programs others have removed."""
        ours = {device.index: device for device in wanted if device.index in self.attached}
        self.attached.intersection_update(ours)
        self._with_egress.intersection_update(ours)
        changed = [index for index, device in ours.items() if device != self._known.get(index)]
        for index in set(changed) - self.attacher.probably_attached(changed):
            self.attached.discard(index)
            self._with_egress.discard(index)
            if _exists(index):
                log.warning(_REMOVED, ours[index].name)
        self._known = {device.index: device for device in wanted}

    def _attach(self, device: Device, hook: str) -> str | None:
        """Attach the program of one hook; return None, or why it failed.

        "" if the device was removed, which is no error: the device watch will report the removal.
        """
        try:
            programs = self.load(device.link_header)
            self.held.restore(self.attacher.pins(device.index))
            if hook == "egress":
                self._recorded_egress.add(device.index)
            self.attacher.attach(device.index, [p for p in programs if p.name == hook])
        except EbpflbError as error:
            return (
                "" if isinstance(error, KernelError) and error.errno == errno.ENODEV else str(error)
            )
        return None


def _exists(index: int) -> bool:
    try:
        socket.if_indextoname(index)
    except OSError:
        return False
    return True


def attached_devices(state: StateDir) -> dict[str, int]:
    """Return how many devices have our programs, by tcx and by clsact. Raises KernelError.

    Only devices of the caller's network namespace count.
    """
    attachers = Tcx(state.devices_directory), Clsact(state.devices_directory)
    counts = Counter({each.name: len(each.attached()) for each in attachers})
    return dict(+counts)


class OthersPrograms(NamedTuple):
    """Device -> programs and filters of other software that run before and after ours."""

    before: dict[str, list[str]]
    after: dict[str, list[str]]


def others_programs(state: StateDir) -> OthersPrograms:
    """Return the programs of other software at devices with our programs.

    Only devices of the caller's network namespace are checked. Raises KernelError.
    """
    by_tcx, by_clsact = Tcx(state.devices_directory), Clsact(state.devices_directory)
    filtered, recorded = by_clsact.others(), by_clsact.recorded()
    further = {it for each in uplink_program.ALL for it in each.programs(state)}
    found = OthersPrograms({}, {})
    for index, name in socket.if_nameindex():
        ours = by_tcx.programs(index)
        for hook in list(ours) or (list(tcx.TCX_HOOKS) if index in recorded else []):
            programs = [it for it in _tcx_programs(index, hook) if it not in further]
            # Filters run after all tcx programs.
            at = programs.index(ours[hook]) if hook in ours else len(programs)
            names = [f"{cgroup_links.program_name(each)} ({hook})" for each in programs]
            early, late = filtered.get((index, hook), NO_FILTERS)
            before = names[:at] + ([] if ours else early)
            after = names[at + 1 :] + (early if ours else []) + late
            found.before.setdefault(name, []).extend(before)
            found.after.setdefault(name, []).extend(after)
    return OthersPrograms(*({name: each for name, each in part.items() if each} for part in found))


def _tcx_programs(index: int, hook: str) -> list[int]:
    try:
        return bpf.query(index, tcx.TCX_HOOKS[hook])
    except KernelError as error:
        if error.errno in (errno.EINVAL, errno.ENODEV):  # no tcx, or the device was removed
            return []
        raise
