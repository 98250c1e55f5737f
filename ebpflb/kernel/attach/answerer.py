# SPDX-License-Identifier: Apache-2.0
"""The program that answers for load balancer addresses (bpf/hooks/answer.c), and its map.

It outlives the agent: so a node keeps answering while no agent runs.
"""

import math
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ebpflb.kernel.attach import uplink_program
from ebpflb.kernel.maps.layout import ANSWERED
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.loader import Program
from ebpflb.kernel.programs.precompile import ANSWER
from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device
from ebpflb.model.pools import is_probed


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
        uplink_program.ANSWER.attach(self._state, devices, self._program)
