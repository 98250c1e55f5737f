# SPDX-License-Identifier: Apache-2.0
"""Attach one more program at ingress of uplinks, before the packet programs, while a part needs it.

    <devices directory>/<name>/<ifindex>  the pin of its tcx link; a directory if it is a filter

It outlives the agent.
"""

import errno
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import clsact, tcx
from ebpflb.kernel.attach.clsact import Filter
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs.loader import Program
from ebpflb.model.devices import Device


class UplinkProgram(NamedTuple):
    """``name``: of the folder, and in the filter's name; ``handle``: of the filter."""

    name: str
    handle: int

    def pinned(self, state: StateDir) -> Mapping[int, Path]:
        """Return the pins, by the device's ifindex."""
        folder = state.devices_directory / self.name
        names = [pin.name for pin in folder.iterdir()] if folder.is_dir() else []
        return {index: folder / str(index) for index in tcx.indexes(names)}

    def programs(self, state: StateDir) -> set[int]:
        """Return the ids of the programs that tcx links attach."""
        found = set()
        for index, pin in self.pinned(state).items():
            if not pin.is_dir():
                with bpf.opened(pin) as link:
                    found.add(tcx.program_at(link, index, "ingress"))
        return found

    def attach(self, state: StateDir, devices: Collection[Device], program: Program) -> None:
        """Attach the program to these devices and no others, also where it was removed.

        Raises KernelError.
        """
        indexes = {device.index for device in devices}
        self.detach(state, self.pinned(state).keys() - indexes)
        for index in indexes:
            try:
                self._attach(state, index, program)
            except KernelError as error:
                if error.errno != errno.ENODEV:  # else the device watch reports the removal
                    raise

    def detach(self, state: StateDir, indexes: Collection[int]) -> None:
        """Remove the program from these devices, which may have been removed."""
        pins = self.pinned(state)
        for index in indexes:
            pin = pins[index]
            if pin.is_dir():
                ours = Filter(clsact.PRIORITY, self.handle, "bpf", self._filter_name(state))
                with suppress(KernelError), clsact.open_kernel() as kernel:
                    clsact.remove_ours(kernel, state.devices_directory, index, "ingress", ours)
                clsact.forget_qdisc(state.devices_directory, index)
                pin.rmdir()
            else:
                tcx.detach(pin)

    def remove(self, state: StateDir) -> None:
        """Remove the program from all devices."""
        self.detach(state, self.pinned(state).keys())

    def _attach(self, state: StateDir, index: int, program: Program) -> None:
        pin = state.devices_directory / self.name / str(index)
        pin.parent.mkdir(mode=0o700, exist_ok=True)
        if not tcx.works():
            self._attach_filter(state, index, program)
            pin.mkdir(exist_ok=True)
            return
        packets = state.devices_directory / f"{index}-ingress"
        with bpf.opened(pin) as link, bpf.opened(packets) as other:
            if link is not None and tcx.runs_before(link, other, index):
                bpf.link_update(link, program.fd)
                return
        tcx.detach(pin)
        with bpf.closing(
            bpf.link_create(program.fd, index, tcx.TCX_HOOKS["ingress"], tcx.BEFORE)
        ) as link:
            bpf.pin(link, str(pin))

    def _attach_filter(self, state: StateDir, index: int, program: Program) -> None:
        name = self._filter_name(state)
        with clsact.open_kernel() as kernel:
            clsact.take_qdisc(kernel, state.devices_directory, index)
            if not clsact.runs_before_packets(index, self.handle):
                clsact.remove_filter(kernel, index, "ingress", self.handle)
            clsact.put_filter(kernel, index, "ingress", self.handle, program.fd, name)

    def _filter_name(self, state: StateDir) -> str:
        return f"{state.devices_directory.parent}:{self.name}"


ANSWER = UplinkProgram("answer", 0xEC)  # bpf/hooks/answer.c
HAND_OVER = UplinkProgram("hand-over", 0xED)  # bpf/hooks/hand_over.c
ALL = ANSWER, HAND_OVER
