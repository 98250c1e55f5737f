# SPDX-License-Identifier: Apache-2.0
"""The program that hands requests to other nodes (bpf/hooks/hand_over.c), and its maps.

It outlives the agent: what is handed over then is what the agent has written last.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import reduce
from operator import xor
from pathlib import Path
from struct import iter_unpack
from typing import NamedTuple

from ebpflb.entries.services import Frontend
from ebpflb.kernel.attach import uplink_program
from ebpflb.kernel.datapath import Datapath, packet_flags
from ebpflb.kernel.maps.layout import HANDED, ffi
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.kernel.programs.loader import Program, ProgramSet
from ebpflb.model.addresses import Address, Family
from ebpflb.model.devices import Device
from ebpflb.plan.handing import HandedFrontend, HandedPlace, HandingPlan, Room

_FAMILIES = ffi.typeof("enum hop_family").relements
BITS = {Family.IPV4: _FAMILIES["HOP_IPV4"], Family.IPV6: _FAMILIES["HOP_IPV6"]}


Members = list[HandedPlace]


class HopEntry(NamedTuple):
    """A value of map hops; ``families``: bits of BITS, in which packets are handed to it."""

    address: Address
    ifindex: int
    own_mac: str
    families: int


class Loaded(NamedTuple):
    """``made_for``: the monitor's programs at that time, or None."""

    program: Program
    made_for: ProgramSet | None


def bit_of(address: Address) -> int:
    """Return the bit of an address in map handed_addresses (bpf/path/hand_over.h)."""
    folded: int = reduce(xor, (word for (word,) in iter_unpack("=I", address.packed[-8:])))
    return (folded * 0x9E3779B1 & 0xFFFFFFFF) >> 17


class Handing:
    """The program of one state directory. Raises NodeError or KernelError for an unusable map."""

    def __init__(self, datapath: Datapath, cache: Path) -> None:
        self._datapath, self._cache = datapath, cache
        self._maps = datapath.state.open_maps(HANDED)
        sizes = [self._maps[it].spec.entries for it in ("handed_places", "handed_frontends")]
        self.room = Room(*sizes)
        self._program: Program | None = None
        self._made_for: ProgramSet | None = None  # None: the usual programs
        self._hops = {mac: HopEntry(*it) for mac, it in self._maps["hops"].items()}
        self._frontends: set[Frontend] = set()
        self._bits: Counter[int] = Counter()  # of their addresses
        self._words: list[int] = []

    def close(self) -> None:
        """Close the descriptors; the program stays."""
        for opened in self._maps.values():
            opened.close()
        if self._program:
            os.close(self._program.fd)

    def read(self) -> tuple[Mapping[Frontend, HandedFrontend], Mapping[int, HandedPlace], Members]:
        """Return the frontends, the places of their blocks, and the members of all blocks."""
        items = self._maps["handed_frontends"].items()
        found = {frontend: HandedFrontend(*it) for frontend, it in items}
        used = {at for it in found.values() for at in range(it.base, it.base + it.size)}
        places = self._maps["handed_places"]
        members = [HandedPlace(*it) for it, _ in self._maps["handed_members"].items()]
        self._know(found)
        return found, {at: HandedPlace(*places.get(at)) for at in sorted(used)}, members

    def _know(self, frontends: Collection[Frontend]) -> None:
        """Write the bits of the frontends that the map has, and no others."""
        addresses = self._maps["handed_addresses"]
        self._frontends = set(frontends)
        self._bits = Counter(bit_of(it.address) for it in self._frontends)
        self._words = [0] * addresses.spec.entries
        for bit in self._bits:
            self._words[bit // 64] |= 1 << bit % 64
        addresses.write([*enumerate(self._words)])

    def _flip(self, frontends: set[Frontend], change: Callable[[Iterable[int]], None]) -> None:
        """Count the bits of these frontends, and write those that are in use or free now."""
        bits = [bit_of(it.address) for it in frontends]
        before = {bit for bit in bits if self._bits[bit]}
        change(bits)
        flipped = {bit for bit in bits if bool(self._bits[bit]) != (bit in before)}
        for bit in flipped:
            self._words[bit // 64] ^= 1 << bit % 64
        words = {bit // 64 for bit in flipped}
        self._maps["handed_addresses"].write([(at, self._words[at]) for at in words])

    def set_hops(self, hops: Mapping[str, HopEntry]) -> None:
        """Write the nodes of the segment, by MAC address, and remove all others."""
        if hops == self._hops:
            return
        new = [(mac, it) for mac, it in hops.items() if self._hops.get(mac) != it]
        self._maps["hops"].write(new)
        self._maps["hops"].delete([mac for mac in self._hops if mac not in hops])
        self._hops = dict(hops)

    def write(self, plan: HandingPlan) -> None:
        """Write a plan in its order."""
        self._maps["handed_places"].write(plan.places)
        self._maps["handed_members"].write([(it, 1) for it in plan.members])
        new = plan.frontends.keys() - self._frontends
        self._flip(new, self._bits.update)
        self._frontends |= new
        self._maps["handed_frontends"].write(list(plan.frontends.items()))
        self._maps["handed_frontends"].delete(list(plan.removed_frontends))
        gone = self._frontends.intersection(plan.removed_frontends)
        self._frontends -= gone
        self._flip(gone, self._bits.subtract)
        self._maps["handed_members"].delete(plan.removed_members)

    @property
    def variant(self) -> object:
        """What ``load`` makes the program for: the monitor's programs, or None."""
        return self._datapath.others

    @property
    def is_loaded(self) -> bool:
        """Whether ``attach`` has the right program."""
        return self._program is not None and self._made_for is self.variant

    def load(self) -> Loaded:
        """Compile and load the program; the monitoring variant while the packet programs are.

        Safe in any thread. Raises CompileError, VerifierError or KernelError.
        """
        others = self._datapath.others
        flags = (*packet_flags(), *((precompile.MONITOR,) if others else ()))
        compiled = compiler.compile_source(precompile.HAND_OVER, flags, cache=self._cache)
        maps = others.maps if others else self._datapath.maps
        (made,) = loader.load(compiled, {**maps, **self._maps})
        return Loaded(made, others)

    def use(self, loaded: Loaded) -> None:
        """Let ``attach`` use this program from now on."""
        if self._program:
            os.close(self._program.fd)
        self._program, self._made_for = loaded

    def attach(self, devices: Collection[Device]) -> None:
        """Attach the program in use to these devices and no others, also where it was removed.

        Raises KernelError.
        """
        if self._program:
            uplink_program.HAND_OVER.attach(self._datapath.state, devices, self._program)
        elif not devices:
            uplink_program.HAND_OVER.remove(self._datapath.state)
