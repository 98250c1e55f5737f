# SPDX-License-Identifier: Apache-2.0
"""The packet programs at this node's devices: two at each device, replaced in place.

They are attached by tcx links if the kernel has them, else by clsact filters; which of the two is
found by trying. A device whose packets have no link header gets another variant of the programs.
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
from ebpflb.datapath.maps.pins import StateDir
from ebpflb.datapath.programs.loader import Program
from ebpflb.errors import EbpflbError, KernelError
from ebpflb.model.devices import Device, Devices

log = logging.getLogger(__name__)

Load = Callable[[bool], list[Program]]


class Way(Protocol):
    """A way to attach programs to a device; the attachments outlive the agent."""

    name: str

    def attach(self, index: int, programs: list[Program]) -> None: ...

    def present(self) -> set[int]:
        """The devices, by ifindex, that seem to have our programs; a cheap look."""

    def held(self) -> set[int]:
        """The devices that have our programs at ingress and egress."""

    def prune(self, wanted: set[int]) -> None: ...


def way(state: StateDir) -> Way:
    """The way that this kernel supports."""
    return Tcx(state.devices_directory) if tcx.works() else Clsact(state.devices_directory)


class Attachments:
    """Attaches programs to devices; ``load`` returns the programs of one variant."""

    def __init__(self, state: StateDir, load: Load) -> None:
        self.load = load
        self.way = way(state)
        self.ours: set[int] = set()  # devices whose programs this agent has loaded

    def follow(self, wanted: Devices) -> dict[str, str]:
        """Attaches the programs to these devices and no others; device -> error."""
        self.way.prune({device.index for device in wanted})
        self._miss(self.way.present(), wanted)
        failed = {}
        for device in sorted(wanted, key=lambda device: not device.link_header):
            if device.index not in self.ours:
                try:
                    self._attach(device)
                except EbpflbError as error:
                    failed[device.name] = str(error)
        return failed

    def restore(self, wanted: Devices) -> dict[str, str]:
        """As ``follow``, but also attaches again what others have removed."""
        self._miss(self.way.held(), wanted)
        return self.follow(wanted)

    def _miss(self, there: set[int], wanted: Devices) -> None:
        """Finds devices whose programs others have removed."""
        lost = self.ours - there
        for name in [device.name for device in wanted if device.index in lost]:
            log.warning("programs were removed from device %s: attaching them again", name)
        self.ours -= lost

    def _attach(self, device: Device) -> None:
        """A device that has been removed is not an error: the device watch will report it."""
        try:
            self.way.attach(device.index, self.load(device.link_header))
        except KernelError as error:
            if error.errno != errno.ENODEV:
                raise
        else:
            self.ours.add(device.index)
            log.debug("programs attached to %s by %s", device.name, self.way.name)


def attached(state: StateDir) -> dict[str, int]:
    """How many devices have our programs, by tcx and by clsact. Raises KernelError.

    Only devices of the caller's network namespace count.
    """
    ways = Tcx(state.devices_directory), Clsact(state.devices_directory)
    counts = Counter({each.name: len(each.held()) for each in ways})
    return dict(+counts)


def ahead(state: StateDir) -> dict[str, list[str]]:
    """Device -> programs of others that run before ours.

    Only devices of the caller's network namespace are looked at.
    """
    found = {name: _ahead(state, index) for index, name in socket.if_nameindex()}
    return {name: programs for name, programs in found.items() if programs}


def _ahead(state: StateDir, index: int) -> list[str]:
    by_tcx, by_clsact = Tcx(state.devices_directory), Clsact(state.devices_directory)
    ours = by_tcx.programs(index)
    ends = list(ours) or (list(tcx.POINTS) if index in by_clsact.known() else [])
    names = []
    for end in ends:
        programs = _tcx_programs(index, end)
        before = programs[: programs.index(ours[end])] if end in ours else programs
        names += [f"{cgroup_links.program_name(number)} ({end})" for number in before]
        names += [] if ours else [f"{name} ({end})" for name in by_clsact.ahead(index, end)]
    return names


def _tcx_programs(index: int, end: str) -> list[int]:
    try:
        return kernel.query(index, tcx.POINTS[end])
    except KernelError as error:
        if error.errno in (errno.EINVAL, errno.ENODEV):  # no tcx, or no such device any more
            return []
        raise
