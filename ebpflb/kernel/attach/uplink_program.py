# SPDX-License-Identifier: Apache-2.0
"""Attach one more program at ingress of uplinks, before the packet programs, while a part needs it.

    <devices directory>/<name>/<ifindex>  the pin of its tcx link; a directory if it is a filter

It outlives the agent.
"""

import errno
import math
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import tcx
from ebpflb.kernel.attach.clsact import Clsact, runs_before_packets
from ebpflb.kernel.attach.tcx import Tcx
from ebpflb.kernel.maps.layout import ANSWERED
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.kernel.programs.loader import Program
from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device
from ebpflb.model.pools import is_probed


class _Links(Tcx):
    def _pin(self, index: int, hook: str) -> Path:
        return self.folder / str(index)

    def runs_first(self, index: int) -> bool:
        packets = self.folder.parent / f"{index}-ingress"
        with bpf.opened(self._pin(index, "ingress")) as link, bpf.opened(packets) as other:
            return link is None or tcx.runs_before(link, other, index)


class _Filters(Clsact):
    def __init__(self, folder: Path, handle: int) -> None:
        super().__init__(folder.parent)
        self._own_folder, self.handle = folder, handle

    def _name(self, hook: str) -> str:
        return f"{self.folder.parent}:{self._own_folder.name}"

    def _record(self, index: int) -> Path:
        return self._own_folder / str(index)

    def runs_first(self, index: int) -> bool:
        return runs_before_packets(index, self.handle)


class UplinkProgram(NamedTuple):
    """``name``: of the folder, and in the filter's name; ``handle``: of the filter."""

    name: str
    handle: int

    def recorded(self, state: StateDir) -> set[int]:
        """Return the devices, by ifindex, that have the program."""
        folder = self._folder(state)
        return tcx.indexes(pin.name for pin in folder.iterdir()) if folder.is_dir() else set()

    def programs(self, state: StateDir) -> set[int]:
        """Return the ids of the programs that tcx links attach."""
        links = _Links(self._folder(state))
        return {id for index in self.recorded(state) for id in links.programs(index).values()}

    def attach(self, state: StateDir, devices: Collection[Device], program: Program) -> None:
        """Attach the program to these devices and no others, also where it was removed.

        Raises KernelError.
        """
        attacher, indexes = self._attacher(state), {device.index for device in devices}
        attacher.detach(self.recorded(state) - indexes)
        self._folder(state).mkdir(mode=0o700, exist_ok=True)
        for index in indexes:
            try:
                if not attacher.runs_first(index):
                    attacher.detach([index])
                attacher.attach(index, [program._replace(name="ingress")])
            except KernelError as error:
                if error.errno != errno.ENODEV:  # else the device watch reports the removal
                    raise

    def remove(self, state: StateDir) -> None:
        """Remove the program from all devices. Raises KernelError."""
        if found := self.recorded(state):
            self._attacher(state).detach(found)

    def _folder(self, state: StateDir) -> Path:
        return state.devices_directory / self.name

    def _attacher(self, state: StateDir) -> _Links | _Filters:
        folder = self._folder(state)
        return _Links(folder) if tcx.works() else _Filters(folder, self.handle)


ANSWER = UplinkProgram("answer", 0xEC)  # bpf/hooks/answer.c
HAND_OVER = UplinkProgram("hand-over", 0xED)  # bpf/hooks/hand_over.c
ALL = ANSWER, HAND_OVER


# The program that answers for load balancer addresses (bpf/hooks/answer.c), and its map.
#
# It outlives the agent: so a node keeps answering while no agent runs.


class Given(NamedTuple):
    """The device, and its MAC address, of the answers for an address; ``until``: see answered.h."""

    ifindex: int
    mac: str
    until: int = 0


class Answerer:
    """The program of one state directory. Raises NodeError or KernelError for an unusable map."""

    def __init__(self, state: StateDir, cache: Path) -> None:
        self._state, self._cache = state, cache
        self._map = state.open_maps({ANSWERED.name: ANSWERED})[ANSWERED.name]
        found = {address: Given(*it) for address, it in self._map.items()}
        self.given = {address: it for address, it in found.items() if not is_probed(address)}
        self._program: Program | None = None

    def close(self) -> None:
        """Close the descriptors; the program keeps answering."""
        self._map.close()
        if self._program:
            os.close(self._program.fd)

    def give(self, address: Address, device: Device) -> None:
        """Answer for the address at this device. Raises KernelError."""
        given = Given(device.index, device.mac)
        if self.given.get(address) != given:
            self._map.write([(address, given)])
            self.given[address] = given

    def live(self, address: Address, device: Device, seconds: float) -> None:
        """Answer for so long for the address by which this node is probed. Raises KernelError."""
        until = 0 if seconds == math.inf else time.monotonic_ns() + int(seconds * 10**9)
        self._map.write([(address, Given(device.index, device.mac, until))])

    def withhold(self, addresses: Collection[Address]) -> None:
        """Answer for these addresses no more. Raises KernelError."""
        self._map.delete(list(addresses))
        for address in addresses:
            self.given.pop(address, None)

    def attach(self, devices: Collection[Device]) -> None:
        """Attach the program to these devices and no others, also where it was removed.

        Raises CompileError, VerifierError or KernelError.
        """
        if self._program is None:
            compiled = compiler.compile_source(precompile.ANSWER, cache=self._cache)
            (self._program,) = loader.load(compiled, {ANSWERED.name: self._map})
        ANSWER.attach(self._state, devices, self._program)
