# SPDX-License-Identifier: Apache-2.0
"""The program that hands requests to other nodes (bpf/hooks/hand_over.c), and its maps.

It outlives the agent: what is handed over then is what the agent has written last.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from ebpflb.entries.services import Frontend
from ebpflb.kernel.attach import uplink_program
from ebpflb.kernel.datapath import Datapath, packet_flags
from ebpflb.kernel.maps.layout import HANDED, ffi
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.kernel.programs.loader import Program, ProgramSet
from ebpflb.model.addresses import Address, Family
from ebpflb.model.devices import Device
from ebpflb.plan.handing import HandedFrontend, HandedPlace, HandingPlan

_FAMILIES = ffi.typeof("enum hop_family").relements
BITS = {Family.IPV4: _FAMILIES["HOP_IPV4"], Family.IPV6: _FAMILIES["HOP_IPV6"]}


Members = list[HandedPlace]


class HopEntry(NamedTuple):
    """A value of map hops; ``families``: bits of BITS, in which packets are handed to it."""

    address: Address
    ifindex: int
    own_mac: str
    families: int


class Handing:
    """The program of one state directory. Raises NodeError or KernelError for an unusable map."""

    def __init__(self, datapath: Datapath, cache: Path) -> None:
        self._datapath, self._cache = datapath, cache
        self._maps = datapath.state.open_maps(HANDED)
        self.capacity = self._maps["handed_places"].spec.entries
        self._program: Program | None = None
        self._made_for: ProgramSet | None = None  # None: the usual programs
        self._hops = {mac: HopEntry(*it) for mac, it in self._maps["hops"].items()}

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
        return found, {at: HandedPlace(*places.get(at)) for at in sorted(used)}, members

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
        self._maps["handed_frontends"].write(list(plan.frontends.items()))
        self._maps["handed_frontends"].delete(list(plan.removed_frontends))
        self._maps["handed_members"].delete(plan.removed_members)

    @property
    def variant(self) -> object:
        """What ``attach`` would load the program with."""
        return self._datapath.others

    def prepare(self) -> None:
        """Compile the program; safe in any thread. Raises CompileError."""
        compiler.compile_source(precompile.HAND_OVER, packet_flags(), cache=self._cache)

    def attach(self, devices: Collection[Device]) -> None:
        """Attach the program to these devices and no others, also where it was removed.

        It is the monitoring variant while the packet programs are. Raises CompileError,
        VerifierError or KernelError.
        """
        hook, state, others = uplink_program.HAND_OVER, self._datapath.state, self.variant
        if not devices:
            hook.remove(state)
            return
        if self._program is None or self._made_for is not others:
            self._load(self._datapath.others)
        assert self._program
        hook.attach(state, devices, self._program)

    def _load(self, others: ProgramSet | None) -> None:
        flags = (*packet_flags(), *((precompile.MONITOR,) if others else ()))
        compiled = compiler.compile_source(precompile.HAND_OVER, flags, cache=self._cache)
        maps = others.maps if others else self._datapath.maps
        (made,) = loader.load(compiled, {**maps, **self._maps})
        if self._program:
            os.close(self._program.fd)
        self._program, self._made_for = made, others
