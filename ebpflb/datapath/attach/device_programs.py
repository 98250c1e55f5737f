# SPDX-License-Identifier: Apache-2.0
"""The packet programs at this node's devices: two at each device, replaced in place.

They are attached by tcx links if the kernel has them, else by clsact filters; which of the two is
found by trying. A device whose packets have no link header gets another variant of the programs.

Ingress opens flows and egress translates their replies, often at another device. So egress is
attached on all devices before ingress on any; and ingress is detached everywhere before egress.
"""

import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from ebpflb.datapath import kernel
from ebpflb.datapath.attach import cgroup_links, tcx
from ebpflb.datapath.attach.clsact import Clsact
from ebpflb.datapath.attach.tcx import Tcx
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.datapath.programs.loader import Program
from ebpflb.errors import EbpflbError, KernelError
from ebpflb.model.devices import Device, Devices

log = logging.getLogger(__name__)

Load = Callable[[bool], list[Program]]
_ATTACH_ORDER = ("egress", "ingress")


class Attacher(Protocol):
    """Attaches programs to devices in one way; the attachments outlive the agent."""

    name: str

    def attach(self, index: int, programs: list[Program]) -> None: ...

    def probably_attached(self) -> set[int]:
        """The devices, by ifindex, that seem to have our programs; a cheap look."""

    def attached(self) -> set[int]:
        """The devices that have our programs at ingress and egress."""

    def detach_others(self, wanted: set[int]) -> None:
        """Detaches from all other devices: ingress everywhere, then egress."""


def attacher(state: StateDir) -> Attacher:
    """The one for the way that this kernel supports."""
    return Tcx(state.devices_directory) if tcx.works() else Clsact(state.devices_directory)


class DevicePrograms:
    """The programs of this agent at the devices; ``load`` returns those of one variant."""

    def __init__(self, state: StateDir, load: Load) -> None:
        self.load = load
        self.attacher = attacher(state)
        self.attached: set[int] = set()  # devices that have programs of this agent

    def update(self, wanted: Devices) -> dict[str, str]:
        """Attaches the programs to these devices and no others; device -> error."""
        self.attacher.detach_others({device.index for device in wanted})
        self._forget_removed(self.attacher.probably_attached(), wanted)
        failed: dict[str, str] = {}
        new = [device for device in wanted if device.index not in self.attached]
        new.sort(key=lambda device: not device.link_header)
        for hook in _ATTACH_ORDER:
            new = [device for device in new if self._attach(device, hook, failed)]
        for device in new:
            self.attached.add(device.index)
            log.debug("programs attached to %s by %s", device.name, self.attacher.name)
        return failed

    def restore(self, wanted: Devices) -> dict[str, str]:
        """As ``update``, but also attaches again what others have removed."""
        self._forget_removed(self.attacher.attached(), wanted)
        return self.update(wanted)

    def _forget_removed(self, found: set[int], wanted: Devices) -> None:
        """Finds devices whose programs others have removed."""
        removed = self.attached - found
        for name in [device.name for device in wanted if device.index in removed]:
            log.warning("programs were removed from device %s: attaching them again", name)
        self.attached -= removed

    def _attach(self, device: Device, hook: str, failed: dict[str, str]) -> bool:
        """Attaches the program of one hook; an error is added to ``failed``.

        A device that has been removed is not an error: the device watch will report it.
        """
        try:
            programs = self.load(device.link_header)
            self.attacher.attach(device.index, [p for p in programs if p.name == hook])
        except EbpflbError as error:
            if not (isinstance(error, KernelError) and error.errno == errno.ENODEV):
                failed[device.name] = str(error)
            return False
        return True


def attached_devices(state: StateDir) -> dict[str, int]:
    """How many devices have our programs, by tcx and by clsact. Raises KernelError.

    Only devices of the caller's network namespace count.
    """
    attachers = Tcx(state.devices_directory), Clsact(state.devices_directory)
    counts = Counter({each.name: len(each.attached()) for each in attachers})
    return dict(+counts)


def programs_before_ours(state: StateDir) -> dict[str, list[str]]:
    """Device -> programs of others that run before ours.

    Only devices of the caller's network namespace are looked at.
    """
    found = {name: _programs_before_ours(state, index) for index, name in socket.if_nameindex()}
    return {name: programs for name, programs in found.items() if programs}


def _programs_before_ours(state: StateDir, index: int) -> list[str]:
    by_tcx, by_clsact = Tcx(state.devices_directory), Clsact(state.devices_directory)
    ours = by_tcx.programs(index)
    hooks = list(ours) or (list(tcx.HOOKS) if index in by_clsact.recorded() else [])
    names = []
    for hook in hooks:
        programs = _tcx_programs(index, hook)
        before = programs[: programs.index(ours[hook])] if hook in ours else programs
        names += [f"{cgroup_links.program_name(number)} ({hook})" for number in before]
        filters = [] if ours else by_clsact.filters_before(index, hook)
        names += [f"{name} ({hook})" for name in filters]
    return names


def _tcx_programs(index: int, hook: str) -> list[int]:
    try:
        return kernel.query(index, tcx.HOOKS[hook])
    except KernelError as error:
        if error.errno in (errno.EINVAL, errno.ENODEV):  # no tcx, or no such device any more
            return []
        raise
