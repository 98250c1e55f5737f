# SPDX-License-Identifier: Apache-2.0
"""The packet programs at this node's devices: two at each device, replaced in place.

They are attached by tcx links if the kernel supports them, else by clsact filters. A device whose
packets have no link header gets another variant of the programs. Ingress opens flows and egress
translates their replies, often at another device. So egress is attached on all devices before
ingress on any, and ingress is detached everywhere before egress.

Besides: the programs' run times, and the removal of a whole state directory.
"""

import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import EbpflbError, KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links, tcx
from ebpflb.kernel.attach.cgroup_links import HeldLinks
from ebpflb.kernel.attach.clsact import NO_FILTERS, Clsact
from ebpflb.kernel.attach.tcx import Tcx
from ebpflb.kernel.maps.state_dir import StateDir, remove_tree
from ebpflb.kernel.programs.loader import Program
from ebpflb.model.devices import Device, Devices
from ebpflb.model.drift import Drift

# How often each hook has run and for how long, if the kernel counts this.
#
# The kernel counts while the sysctl kernel.bpf_stats_enabled is 1, or a process holds
# BPF_ENABLE_STATS; each run then reads the clock twice. The counts stay when counting ends.

STATS_SWITCH = Path("/proc/sys/kernel/bpf_stats_enabled")  # 5.1


class RunTime(NamedTuple):
    """The run time of one hook, summed over all places where it is attached."""

    seconds: float
    runs: int


def statistics_enabled() -> bool:
    """Whether the sysctl is 1; BPF_ENABLE_STATS of another process cannot be detected."""
    try:
        return STATS_SWITCH.read_text().strip() == "1"
    except OSError:
        return False


def run_times(state: StateDir, loaded: Iterable[Program]) -> dict[str, RunTime]:
    """Return the run time by hook.

    If nothing was ``loaded``, the programs of an earlier agent serve: they are found by their
    links; those attached by clsact filters are not found. Raises KernelError; opening a program by
    its id takes CAP_SYS_ADMIN.
    """
    own = [(program.name, program.fd) for program in loaded]
    if own:
        return _sums(own)
    with ExitStack() as opened:
        found = []
        for name, number in sorted(_in_force(state)):
            fd = bpf.prog_by_id(number)
            opened.callback(os.close, fd)
            found.append((name, fd))
        return _sums(found)


def _in_force(state: StateDir) -> set[tuple[str, int]]:
    """Return hook and program id of every pinned link, at the cgroup and by tcx at devices."""
    at_devices = Tcx(state.devices_directory)
    packets = (at_devices.programs(index).items() for index in at_devices.recorded())
    return {*cgroup_links.attached(state).items(), *(pair for pairs in packets for pair in pairs)}


def _sums(programs: Iterable[tuple[str, int]]) -> dict[str, RunTime]:
    sums: dict[str, RunTime] = {}
    for name, fd in programs:
        info = bpf.info(fd, "prog_info")
        seconds, runs = sums.get(name, (0.0, 0))
        sums[name] = RunTime(seconds + info.run_time / 1e9, runs + info.run_count)
    return sums


# Remove one state directory: attachments first, so that no program runs with only half of the maps.


def unpin_all(state: StateDir) -> None:
    """Remove the state directory. Raises KernelError.

    Filters are removed only from devices of the caller's network namespace.
    """
    if not state.directory.is_dir():
        return
    for attacher in (Clsact(state.devices_directory), Tcx(state.devices_directory)):
        attacher.detach_others(set())
    for pin in state.links():
        tcx.detach(pin)
    for directory in (state.devices_directory, state.links_directory, state.directory):
        remove_tree(directory)


log = logging.getLogger(__name__)

Load = Callable[[bool], list[Program]]
_REMOVED = "programs were removed from device %s: attaching them again"
_ATTACH_ORDER = ("egress", "ingress")


Attacher = Tcx | Clsact  # their attachments outlive the agent


def attacher(state: StateDir) -> Attacher:
    """Return the attacher for the way that this kernel supports."""
    return Tcx(state.devices_directory) if tcx.works() else Clsact(state.devices_directory)


class DevicePrograms:
    """The programs of this agent at the devices.

    ``load`` returns those for devices with, or without, a link header.
    """

    def __init__(self, state: StateDir, load: Load, held: HeldLinks | None = None) -> None:
        self.load = load
        self.attacher = attacher(state)
        self.held = HeldLinks() if held is None else held
        self.attached: set[int] = set()  # devices that have programs of this agent
        self._known: set[Device] = set()  # devices as they were at the last ``update``
        self._faulty: set[int] = set()  # attached devices at which ``faults`` found something

    def update(self, wanted: Devices) -> dict[str, str]:
        """Attach the programs to these devices and no others; return device -> error.

        Only devices that have changed are checked for the programs; ``faults`` checks all.
        """
        indexes = {device.index for device in wanted}
        self.attacher.detach_others(indexes)
        if not self._known or any(device.index not in indexes for device in self._known):
            self._release_others(indexes)
        self._forget_removed(wanted)
        failed: dict[str, str] = {}
        new = [device for device in wanted if device.index not in self.attached]
        new.sort(key=lambda device: not device.link_header)
        for hook in _ATTACH_ORDER:
            new = [device for device in new if self._attach(device, hook, failed)]
        for device in new:
            self.attached.add(device.index)
            self.held.hold(self.attacher.pins(device.index))
            log.debug("programs attached to %s by %s", device.name, self.attacher.name)
        return failed

    def restore(self, wanted: Devices) -> dict[str, str]:
        """Like ``update``, but also attach again where ``faults`` found something."""
        self.attached -= self._faulty
        self._faulty.clear()
        return self.update(wanted)

    def faults(self, wanted: Devices) -> Iterator[list[Drift]]:
        """Yield the faults at each device that has programs of this agent, device by device.

        A device that is removed meanwhile has no faults: the device watch will report the removal.
        """
        for device in wanted:
            yield self._faults(device) if device.index in self.attached else []

    def _release_others(self, kept: set[int]) -> None:
        pins = {pin for index in kept for pin in self.attacher.pins(index)}
        ours = (pin for pin in self.held.pins() if pin.parent == self.attacher.folder)
        self.held.release([pin for pin in ours if pin not in pins])

    def _faults(self, device: Device) -> list[Drift]:
        found = list(self.attacher.faults(device, self._ids(device), self.held))
        if not found or not _exists(device.index):
            return []
        self._faulty.add(device.index)
        return found

    def _ids(self, device: Device) -> dict[str, int]:
        """Return hook -> id of the program that should be there."""
        programs = self.load(device.link_header)
        return {each.name: int(bpf.info(each.fd, "prog_info").id) for each in programs}

    def _forget_removed(self, wanted: Devices) -> None:
        """Forget devices that are gone, and those whose programs others have removed."""
        ours = {device.index: device for device in wanted if device.index in self.attached}
        self.attached.intersection_update(ours)
        changed = [index for index, device in ours.items() if device not in self._known]
        for index in set(changed) - self.attacher.probably_attached(changed):
            self.attached.discard(index)
            if _exists(index):
                log.warning(_REMOVED, ours[index].name)
        self._known = set(wanted)

    def _attach(self, device: Device, hook: str, failed: dict[str, str]) -> bool:
        """Attach the program of one hook; add an error to ``failed``.

        A device that was removed is no error: the device watch will report the removal.
        """
        try:
            programs = self.load(device.link_header)
            self.held.restore(self.attacher.pins(device.index))
            self.attacher.attach(device.index, [p for p in programs if p.name == hook])
        except EbpflbError as error:
            if not (isinstance(error, KernelError) and error.errno == errno.ENODEV):
                failed[device.name] = str(error)
            return False
        return True


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
    found = OthersPrograms({}, {})
    for index, name in socket.if_nameindex():
        ours = by_tcx.programs(index)
        for hook in list(ours) or (list(tcx.TCX_HOOKS) if index in recorded else []):
            programs = _tcx_programs(index, hook)
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
