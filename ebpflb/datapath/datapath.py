# SPDX-License-Identifier: Apache-2.0
"""Make it so: one node's maps and programs, as the agent uses them.

open      adopt or make the maps
load      bytecode -> programs on these maps, not yet in force
present   what the maps hold
apply     carry out a plan, in its order
attach    put the programs in force, in place of the old ones
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

from ebpflb.datapath import compiler, layout, links, probe, programs, witness
from ebpflb.datapath.maps import Counters
from ebpflb.datapath.programs import Program
from ebpflb.datapath.records import Settings
from ebpflb.datapath.state import State
from ebpflb.model.addresses import Address
from ebpflb.plan.entries import Flags
from ebpflb.plan.plan import Plan
from ebpflb.plan.planner import Capacity
from ebpflb.plan.present import Present, read_back

SOURCE = "hooks/socket.c"
_GONE = "gone_"
CAPACITY = Capacity(
    services=layout.MAPS["services"].entries,
    slots=layout.MAPS["slots"].entries,
    service_ids=layout.MAPS["service_stats"].entries,
    backend_ids=layout.MAPS["members"].entries,
)


def flags() -> tuple[str, ...]:
    """The compiler's flags for what this kernel can do."""
    return ("-DHAVE_SET_RETVAL",) if probe.set_retval() else ()


class Datapath:
    """The maps and programs below one state directory."""

    def __init__(self, state: State) -> None:
        """Raises NodeError or KernelError where the kernel does not let us."""
        with suppress(ValueError, OSError):  # charged before 5.11; not ours to raise in a container
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
        state.prepare()
        self.state = state
        self.maps = state.open_maps()
        self.programs: list[Program] = []
        self.host_netns = 0

    def close(self) -> None:
        """Lets go of everything; what is pinned serves on."""
        programs.close(self.programs)
        for opened in self.maps.values():
            opened.close()

    def load(self, cache: Path) -> bool:
        """Loads the programs; whether they had to be compiled.

        Raises CompileError or VerifierError; then the old programs keep serving.
        """
        self.host_netns = witness.netns_cookie(cache) or self._settings().host_netns
        compiled = compiler.compile_source(SOURCE, flags(), cache=cache)
        self.programs = programs.load(compiled, self.maps)
        return not compiled.cached

    def attach(self, cgroup: Path) -> None:
        """Puts the loaded programs in force; maps of other layouts are no longer needed."""
        links.attach(self.state, cgroup, self.programs)
        self.state.forget_old_layouts()

    def serves(self) -> bool:
        """Whether programs of this layout are in force already."""
        return bool(links.attached(self.state)) and not self.state.old_layouts()

    def present(self) -> Present:
        """What the maps hold, whoever wrote it."""
        return read_back(
            self.maps["services"].items(),
            self.maps["slots"].get,
            self.maps["members"].get,
            dict(self.maps["service_names"].items()),
            dict(self.maps["backend_names"].items()),
        )

    def apply(self, plan: Plan) -> None:
        """Writes what the plan says. Raises KernelError having written a part, which is safe."""
        with self._writing():
            for part in fields(plan):
                rows = getattr(plan, part.name)
                if part.name.startswith(_GONE):
                    self.maps[part.name.removeprefix(_GONE)].delete(rows)
                else:
                    self.maps[part.name].write(rows)
            self._counters("service_stats").zero(plan.gone_service_names)
            self._counters("backend_stats").zero(plan.gone_backend_names)

    def serve_nodeports_on(self, addresses: frozenset[Address]) -> None:
        """Makes these the node's addresses."""
        held = {address for address, _ in self.maps["node_addresses"].items()}
        if held == addresses:
            return
        with self._writing():
            self.maps["node_addresses"].write([(a, 1) for a in sorted(addresses - held, key=str)])
            self.maps["node_addresses"].delete(sorted(held - addresses, key=str))

    def set(self, chosen: Flags) -> None:
        """Writes the operator's flags, and who the node is."""
        writes = self._settings().writes
        self._set(Settings(self.host_netns, writes + writes % 2, chosen))

    def _counters(self, name: str) -> Counters:
        opened = self.maps[name]
        assert isinstance(opened, Counters)
        return opened

    def _settings(self) -> Settings:
        found: Settings = self.maps["settings"].get(0)
        return found

    def _set(self, settings: Settings) -> None:
        if settings != self._settings():
            self.maps["settings"].write([(0, settings)])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Odd while maps are written: a reader that saw it odd, or changed, read a mixture."""
        settings = self._settings()
        begun = settings.writes + 1 - settings.writes % 2
        self._set(settings._replace(writes=begun))
        yield
        self._set(settings._replace(writes=begun + 1))
