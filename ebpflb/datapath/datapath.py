# SPDX-License-Identifier: Apache-2.0
"""Make it so: one node's maps and programs, as the agent uses them.

open      adopt or make the maps
load      bytecode -> programs on these maps, not yet in force
present   what the maps hold
apply     carry out a plan, in its order
hold      make a small map equal to what is wanted
attach    put the programs in force, in place of the old ones
follow    the same at devices that come and go
restore   the same where others took them off
"""

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from ebpflb.datapath import probe
from ebpflb.datapath.attach import cgroup_links, netns_cookie
from ebpflb.datapath.attach.device_programs import Attachments
from ebpflb.datapath.maps import layout
from ebpflb.datapath.maps.bpf_map import Counters
from ebpflb.datapath.maps.pins import StateDir
from ebpflb.datapath.programs import compiler, loader
from ebpflb.datapath.programs.loader import Program
from ebpflb.model.devices import Devices
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.entries import NOWHERE, Settings
from ebpflb.plan.map_contents import MapContents, read_back
from ebpflb.plan.plan import Plan

SOURCE, PACKETS = "hooks/socket.c", "hooks/packet.c"
# By whether packets have a link header: a device's that have none begin with the IP header.
_VARIANTS = {True: (), False: ("-DNO_LINK_HEADER",)}
_REMOVED = "removed_"
CAPACITY = Capacity(
    services=layout.MAPS["services"].entries,
    slots=layout.MAPS["slots"].entries,
    service_ids=layout.MAPS["service_stats"].entries,
    backend_ids=layout.MAPS["members"].entries,
    source_ranges=layout.MAPS["source_ranges"].entries,
)


def flags() -> tuple[str, ...]:
    """The compiler's flags for what this kernel can do at sockets."""
    return ("-DHAVE_SET_RETVAL",) if probe.set_retval() else ()


def packet_flags() -> tuple[str, ...]:
    """And at devices."""
    return ("-DHAVE_COARSE_CLOCK",) if probe.coarse_clock() else ()


class Datapath:
    """The maps and programs below one state directory."""

    def __init__(self, state: StateDir) -> None:
        """Raises NodeError or KernelError where the kernel does not let us."""
        with suppress(ValueError, OSError):  # charged before 5.11; not ours to raise in a container
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
        state.prepare()
        self.state = state
        self.maps = state.open_maps()
        self.programs: list[Program] = []
        self.packets: dict[bool, list[Program]] = {}  # by: with a link header
        self.devices = Attachments(state, self.packets.__getitem__)
        self.host_netns = 0

    def close(self) -> None:
        """Lets go of everything; what is pinned serves on."""
        for each in (self.programs, *self.packets.values()):
            loader.close(each)
        for opened in self.maps.values():
            opened.close()

    def load(self, cache: Path) -> bool:
        """Loads the programs; whether they had to be compiled.

        Raises CompileError, VerifierError or KernelError; then the old programs keep serving.
        """
        self.host_netns = netns_cookie.netns_cookie(cache) or self._settings().host_netns
        sockets = compiler.compile_source(SOURCE, flags(), cache=cache)
        packets = {
            link_header: compiler.compile_source(PACKETS, (*packet_flags(), *more), cache=cache)
            for link_header, more in _VARIANTS.items()
        }
        for link_header, compiled in packets.items():
            self.packets[link_header] = loader.load(compiled, self.maps)
        self.programs = loader.load(sockets, self.maps)
        return not all(compiled.cached for compiled in (sockets, *packets.values()))

    @property
    def loaded(self) -> list[Program]:
        """All programs of this agent; none where old ones are to serve on."""
        every = (self.programs, *self.packets.values()) if self.programs else ()
        return [program for each in every for program in each]

    def attach(self, cgroup: Path, served: Devices) -> dict[str, str]:
        """Puts the loaded programs in force; device -> why it could not be done there.

        Maps of other layouts are no longer needed then. Raises KernelError for the cgroup.
        """
        cgroup_links.attach(self.state, cgroup, self.programs)
        failed = self.devices.follow(served)
        self.state.forget_old_layouts()
        return failed

    def follow(self, served: Devices) -> dict[str, str]:
        """These devices are served now, and no others; device -> why it could not be done."""
        return self.devices.follow(served)

    def restore(self, served: Devices) -> dict[str, str]:
        """The same, and what others took off them goes back."""
        return self.devices.restore(served)

    def serves(self) -> bool:
        """Whether programs of this layout are in force already."""
        return bool(cgroup_links.attached(self.state)) and not self.state.old_layouts()

    def present(self) -> MapContents:
        """What the maps hold, whoever wrote it."""
        return read_back(
            self.maps["services"].items(),
            self.maps["slots"].get,
            self.maps["members"].get,
            dict(self.maps["service_names"].items()),
            dict(self.maps["backend_names"].items()),
            [key for key, _ in self.maps["source_ranges"].items()],
            [key for key, _ in self.maps["cluster_ips"].items()],
        )

    def apply(self, plan: Plan) -> None:
        """Writes what the plan says. Raises KernelError having written a part, which is safe."""
        with self._writing():
            self._counters("backend_stats").zero(self._given_again(plan))
            for part in fields(plan):
                rows = getattr(plan, part.name)
                if part.name.startswith(_REMOVED):
                    self.maps[part.name.removeprefix(_REMOVED)].delete(rows)
                else:
                    self.maps[part.name].write(rows)
            self._counters("service_stats").zero(plan.removed_service_names)

    def _given_again(self, plan: Plan) -> list[int]:
        """Ids of former backends that are new ones' now. Until then their counters tell whether
        sockets still hold them.
        """
        slots = self.maps["members"]
        return [id for id, _ in plan.backend_names if slots.get(id) == NOWHERE]

    def hold(self, name: str, wanted: Mapping[Any, Any]) -> None:
        """Makes a map equal to this, writing only what differs."""
        held = dict(self.maps[name].items())
        new = [(key, value) for key, value in wanted.items() if held.get(key) != value]
        gone = [key for key in held if key not in wanted]
        if new or gone:
            with self._writing():
                self.maps[name].write(new)
                self.maps[name].delete(gone)

    def set(self, chosen: Mapping[str, Any]) -> None:
        """Writes these fields of the settings, if they differ, and who the node is."""
        settings = self._settings()
        writes = settings.writes + settings.writes % 2
        self._set(settings._replace(host_netns=self.host_netns, writes=writes, **chosen))

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
