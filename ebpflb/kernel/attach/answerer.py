# SPDX-License-Identifier: Apache-2.0
"""The program that answers for load balancer addresses (bpf/hooks/answer.c), and its map.

    <devices directory>/answer/<ifindex>  the pin of its tcx link; a directory if it is a filter

It is attached at ingress of the uplinks, before all other programs, and outlives the agent: so a
node keeps answering while no agent runs.
"""

import errno
import math
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf, netlink
from ebpflb.kernel.attach import clsact, tcx
from ebpflb.kernel.maps.layout import ANSWERED
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.loader import Program
from ebpflb.kernel.programs.precompile import ANSWER
from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device
from ebpflb.model.pools import is_probed

_HANDLE = 0xEC  # of the filter; the packet programs' have another
_FOLDER = "answer"


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
            compiled = compiler.compile_source(ANSWER, cache=self._cache)
            (self._program,) = loader.load(compiled, {ANSWERED.name: self._map})
        indexes = {device.index for device in devices}
        detach(self._state, pinned(self._state).keys() - indexes)
        for index in indexes:
            try:
                _attach(self._state, index, self._program)
            except KernelError as error:
                if error.errno != errno.ENODEV:  # else the device watch reports the removal
                    raise


def pinned(state: StateDir) -> Mapping[int, Path]:
    """Return the pins of the program, by the device's ifindex."""
    folder = state.devices_directory / _FOLDER
    names = [pin.name for pin in folder.iterdir()] if folder.is_dir() else []
    return {index: folder / str(index) for index in tcx.indexes(names)}


def programs(state: StateDir) -> set[int]:
    """Return the ids of the programs that tcx links attach."""
    found = set()
    for index, pin in pinned(state).items():
        if not pin.is_dir():
            with bpf.opened(pin) as link:
                found.add(tcx.program_at(link, index, "ingress"))
    return found


def detach(state: StateDir, indexes: Collection[int]) -> None:
    """Remove the program from these devices, which may have been removed."""
    pins = pinned(state)
    for index in indexes:
        pin = pins[index]
        if pin.is_dir():
            with suppress(OSError), netlink.route_socket() as kernel:
                clsact.remove_filter(kernel, index, "ingress", _HANDLE)
            pin.rmdir()
        else:
            tcx.detach(pin)


def remove(state: StateDir) -> None:
    """Remove the program from all devices: nothing is answered any more."""
    detach(state, pinned(state).keys())


def _attach(state: StateDir, index: int, program: Program) -> None:
    pin = state.devices_directory / _FOLDER / str(index)
    pin.parent.mkdir(mode=0o700, exist_ok=True)
    if not tcx.works():
        _attach_filter(state, index, program)
        pin.mkdir(exist_ok=True)
        return
    with bpf.opened(pin) as link:
        if link is not None and tcx.program_at(link, index, "ingress"):
            bpf.link_update(link, program.fd)
            return
    pin.unlink(missing_ok=True)
    with bpf.closing(
        bpf.link_create(program.fd, index, tcx.TCX_HOOKS["ingress"], tcx.BEFORE)
    ) as link:
        bpf.pin(link, str(pin))


def _attach_filter(state: StateDir, index: int, program: Program) -> None:
    name = f"{state.devices_directory.parent}:{_FOLDER}"
    try:
        with netlink.route_socket() as kernel:
            with suppress(FileExistsError):
                clsact.add_qdisc(kernel, index)
            clsact.put_filter(kernel, index, "ingress", _HANDLE, program.fd, name)
    except OSError as error:
        raise KernelError("clsact", error.errno or 0, str(error.strerror)) from error
