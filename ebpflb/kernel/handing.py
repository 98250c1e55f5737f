# SPDX-License-Identifier: Apache-2.0
"""The program that hands requests to other nodes (bpf/hooks/hand_over.c), and its maps.

It outlives the agent: what is handed over then is what the agent has written last.
"""

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from struct import pack
from typing import NamedTuple

from ebpflb.entries.services import Frontend
from ebpflb.kernel.attach import uplink_program
from ebpflb.kernel.datapath import Datapath, packet_flags
from ebpflb.kernel.map_writer import FrontendBits
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import HANDED, ffi
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.kernel.programs.loader import Program, ProgramSet
from ebpflb.model.addresses import Address, Family
from ebpflb.model.devices import Device
from ebpflb.plan.handing import HandedFrontend, HandedPlace, HandingPlan, Room

_FAMILIES = ffi.typeof("enum hop_family").relements
BITS = {Family.IPV4: _FAMILIES["HOP_IPV4"], Family.IPV6: _FAMILIES["HOP_IPV6"]}


WORDS = ffi.sizeof("struct address_bits") // 8

Members = list[HandedPlace]


class HopEntry(NamedTuple):
    """A value of map hops; ``families``: bits of BITS, in which packets are handed to it."""

    address: Address
    ifindex: int
    own_mac: str
    families: int


def believed(state: StateDir) -> set[tuple[Family, str]]:
    """Return the MAC addresses that packets are handed to. Raises NodeError and KernelError."""
    (opened,) = state.open_maps({"hops": HANDED["hops"]}).values()
    with closing(opened):
        found = [(mac, HopEntry(*it).families) for mac, it in opened.items()]
    return {(family, mac) for mac, bits in found for family, bit in BITS.items() if bits & bit}


class Loaded(NamedTuple):
    """``made_for``: the monitor's programs at that time, or None."""

    program: Program
    made_for: ProgramSet | None


def bit_of(address: Address) -> int:
    """Return the bit of an address in map handed_addresses (bpf/path/hand_over.h)."""
    words = int.from_bytes(address.packed[-8:], sys.byteorder)
    return (words * 0x9E3779B97F4A7C15 & 2**64 - 1) >> 49


class AddressBits:
    """The bits that map handed_addresses has."""

    def __init__(self, opened: Map) -> None:
        self._map, self._words = opened, [0] * WORDS

    def flip(self, bits: Iterable[int]) -> None:
        """Write them. Raises KernelError."""
        for bit in bits:
            self._words[bit // 64] ^= 1 << 63 - bit % 64
        self._map.write([(0, pack(f"={WORDS}Q", *self._words))])


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
        self._frontends = FrontendBits(lambda it: bit_of(it.address))
        self._bits = AddressBits(self._maps["handed_addresses"])

    def close(self) -> None:
        """Close the descriptors; the program stays."""
        for opened in self._maps.values():
            opened.close()
        if self._program:
            os.close(self._program.fd)

    def read(self) -> tuple[Mapping[Frontend, HandedFrontend], Mapping[int, HandedPlace], Members]:
        """Return the frontends, the places of their blocks, and the members of other blocks.

        Safe in another thread while nothing is written.
        """
        items = self._maps["handed_frontends"].items()
        found = {frontend: HandedFrontend(*it) for frontend, it in items}
        used = {at for it in found.values() for at in range(it.base, it.base + it.size)}
        blocks = {pack("=I", it.block) for it in found.values()}
        places, members = self._maps["handed_places"], self._maps["handed_members"]
        place = cache(lambda packed: HandedPlace(*places.value.unpack(packed)))
        left = [place(it) for it, _ in members.packed_items() if it[-4:] not in blocks]
        each = enumerate(value for _, value in places.packed_items()) if used else ()
        # The bits of the frontends that the map has, and no others.
        self._frontends = FrontendBits(lambda it: bit_of(it.address))
        self._bits = AddressBits(self._maps["handed_addresses"])
        self._bits.flip(self._frontends.add(found))
        return found, {at: place(value) for at, value in each if at in used}, left

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
        if taken := self._frontends.add(plan.frontends):
            self._bits.flip(taken)
        self._maps["handed_frontends"].write(list(plan.frontends.items()))
        self._maps["handed_frontends"].delete(list(plan.removed_frontends))
        if freed := self._frontends.remove(plan.removed_frontends):
            self._bits.flip(freed)
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
