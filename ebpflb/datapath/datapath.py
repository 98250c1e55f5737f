# SPDX-License-Identifier: Apache-2.0
"""One node's maps and programs, as the agent uses them.

How an agent uses it:

Datapath          opens the maps in the state directory, or creates them
load              compiles the programs, or takes them from the cache, and loads them
read_contents     what is in the maps, for the planner
apply             writes a plan to the maps, in its order: so EndpointSlices become slots
write_map         makes a small map equal to a mapping
write_settings    writes the map of settings
attach            attaches the programs in place of the old ones
attach_devices    attaches them to new devices, and detaches them from others
restore_devices   attaches them again where others have removed them
"""

import resource
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from ebpflb.datapath import probe
from ebpflb.datapath.attach import cgroup_links, netns_cookie
from ebpflb.datapath.attach.device_programs import DevicePrograms
from ebpflb.datapath.maps import layout
from ebpflb.datapath.maps.bpf_map import Counters
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.datapath.programs import compiler, loader
from ebpflb.datapath.programs.loader import Program
from ebpflb.model.devices import Devices
from ebpflb.model.services import Protocol
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.entries import NOWHERE, Settings
from ebpflb.plan.map_contents import MapContents, read_back
from ebpflb.plan.plan import Plan

SOCKET_SOURCE, PACKET_SOURCE = "hooks/socket.c", "hooks/packet.c"
# By whether packets have a link header; without one they begin with the IP header.
_VARIANTS = {True: (), False: ("-DNO_LINK_HEADER",)}
_REMOVED = "removed_"
_ATTACHING, NO_FLAGS = frozenset({"attaching"}), frozenset[str]()
CAPACITY = Capacity(
    services=layout.MAPS["services"].entries,
    slots=layout.MAPS["slots"].entries,
    service_ids=layout.MAPS["service_stats"].entries,
    backend_ids=layout.MAPS["backend_slots"].entries,
    source_ranges=layout.MAPS["source_ranges"].entries,
)


def socket_flags() -> tuple[str, ...]:
    """The compiler's flags for the socket hooks on this kernel."""
    return ("-DHAVE_SET_RETVAL",) if probe.set_retval() else ()


def packet_flags(*, conntrack: bool = False) -> tuple[str, ...]:
    """The compiler's flags for the packet hooks on this kernel; with both engines, or one."""
    clock = ("-DHAVE_COARSE_CLOCK",) if probe.coarse_clock() else ()
    return (*clock, "-DHAVE_CONNTRACK") if conntrack else clock


class Datapath:
    """The maps and programs of one state directory."""

    def __init__(self, state: StateDir) -> None:
        """Raises NodeError or KernelError if the maps cannot be opened."""
        with suppress(ValueError, OSError):  # before 5.11; not allowed in a container
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
        state.prepare()
        self.state = state
        self.maps = state.open_maps()
        self._draw_secret()
        self.socket_programs: list[Program] = []
        # By whether packets have a link header.
        self.packet_programs: dict[bool, list[Program]] = {}
        self.devices = DevicePrograms(state, self.packet_programs.__getitem__)
        self.host_netns = 0
        # Until all devices have programs packets open no flows: replies to a flow may come in at
        # one device that has none yet, and leave by another (see SETTING_ATTACHING).
        unfinished = self._settings().flags >= _ATTACHING
        self._flags = _ATTACHING if unfinished or not cgroup_links.attached(state) else NO_FLAGS

    def close(self) -> None:
        """Closes all descriptors; pinned maps and links keep serving."""
        for each in (self.socket_programs, *self.packet_programs.values()):
            loader.close(each)
        for opened in self.maps.values():
            opened.close()

    def load(self, cache: Path, *, conntrack: bool = False) -> bool:
        """Loads the programs; returns whether they had to be compiled.

        ``conntrack``: those for packets use the kernel's conntrack too (conntrack_probe.py).
        Raises CompileError, VerifierError, KernelError or NodeError; then the old programs keep
        serving.
        """
        flags = packet_flags(conntrack=conntrack)
        self.host_netns = netns_cookie.netns_cookie(cache) or self._settings().host_netns
        sockets = compiler.compile_source(SOCKET_SOURCE, socket_flags(), cache=cache)
        packets = {
            link_header: compiler.compile_source(PACKET_SOURCE, flags + more, cache=cache)
            for link_header, more in _VARIANTS.items()
        }
        for link_header, compiled in packets.items():
            self.packet_programs[link_header] = loader.load(compiled, self.maps)
        self.socket_programs = loader.load(sockets, self.maps)
        return not all(compiled.cached for compiled in (sockets, *packets.values()))

    @property
    def programs(self) -> list[Program]:
        """The programs that this agent has loaded; none if an earlier agent's keep serving."""
        if not self.socket_programs:
            return []
        return [*self.socket_programs, *chain.from_iterable(self.packet_programs.values())]

    def attach(self, cgroup: Path, served: Devices) -> dict[str, str]:
        """Attaches the loaded programs, and unpins maps of other layouts; device -> error.

        Raises KernelError if they cannot be attached to the cgroup.
        """
        cgroup_links.attach(self.state, cgroup, self.socket_programs)
        failed = self.devices.update(served)
        self._flags = NO_FLAGS
        self.write_settings({"flags": self._settings().flags - _ATTACHING})
        self.state.remove_old_layouts()
        return failed

    def attach_devices(self, served: Devices) -> dict[str, str]:
        """Attaches the programs to these devices and no others; device -> error."""
        return self.devices.update(served)

    def restore_devices(self, served: Devices) -> dict[str, str]:
        """As ``attach_devices``, but also attaches again what others have removed."""
        return self.devices.restore(served)

    def is_attached(self) -> bool:
        """Whether programs of this layout are already attached, at all devices."""
        attached = cgroup_links.attached(self.state) and not self._flags
        return bool(attached) and not self.state.old_layouts()

    def read_contents(self) -> MapContents:
        """The content of the maps, which an earlier agent may have written."""
        return read_back(
            self.maps["services"].items(),
            self.maps["slots"].get,
            self.maps["backend_slots"].get,
            dict(self.maps["service_names"].items()),
            dict(self.maps["backend_names"].items()),
            [key for key, _ in self.maps["source_ranges"].items()],
            [key for key, _ in self.maps["cluster_ips"].items()],
        )

    def apply(self, plan: Plan) -> None:
        """Writes the plan. Raises KernelError after some of the writes, which is a safe state."""
        with self._writing(frontends_move=self._moves_frontends(plan)):
            self._counters("backend_stats").zero(self._reused_ids(plan))
            for part in fields(plan):
                rows = getattr(plan, part.name)
                if part.name.startswith(_REMOVED):
                    self.maps[part.name.removeprefix(_REMOVED)].delete(rows)
                else:
                    self.maps[part.name].write(rows)
            self._counters("service_stats").zero(plan.removed_service_names)

    def _moves_frontends(self, plan: Plan) -> bool:
        """Whether UDP frontends get another service than they have, or one where they have none."""
        former = self.maps["services"].get
        udp = ((f, new.id) for f, new in plan.services if f.protocol == Protocol.UDP)
        return any(not (old := former(f)) or old.id != id for f, id in udp)

    def _reused_ids(self, plan: Plan) -> list[int]:
        """Ids of removed backends that new backends get. Before that, their counters show whether
        sockets still use them.
        """
        slots = self.maps["backend_slots"]
        return [id for id, _ in plan.backend_names if slots.get(id) == NOWHERE]

    def write_map(self, name: str, wanted: Mapping[Any, Any]) -> None:
        """Makes a map equal to ``wanted``, and writes only what differs."""
        former = dict(self.maps[name].items())
        new = [(key, value) for key, value in wanted.items() if former.get(key) != value]
        removed = [key for key in former if key not in wanted]
        if new or removed:
            with self._writing():
                self.maps[name].write(new)
                self.maps[name].delete(removed)

    def write_settings(self, values: Mapping[str, Any]) -> None:
        """Writes these fields of the settings and the node's netns cookie, if they differ."""
        settings = self._settings()._replace(host_netns=self.host_netns, **values)
        settings = settings._replace(flags=settings.flags | self._flags)
        unfinished = bool(settings.writes % 2)
        self._write_settings(_written(settings, frontends_move=unfinished))

    def _draw_secret(self) -> None:
        """Only once: packets of one flow must agree, whichever agent or version runs."""
        if not self.maps["secret"].get(0):
            self.maps["secret"].write([(0, secrets.randbits(64) | 1)])

    def _counters(self, name: str) -> Counters:
        opened = self.maps[name]
        assert isinstance(opened, Counters)
        return opened

    def _settings(self) -> Settings:
        found: Settings = self.maps["settings"].get(0)
        return found

    def _write_settings(self, settings: Settings) -> None:
        if settings != self._settings():
            self.maps["settings"].write([(0, settings)])

    @contextmanager
    def _writing(self, *, frontends_move: bool = False) -> Iterator[None]:
        """Makes the count of writes odd meanwhile: a reader that sees it odd or changed has read a
        mixture of two states. After an error it stays odd on purpose: the maps hold such a mixture.
        """
        settings = self._settings()
        begun = settings._replace(writes=settings.writes + 1 - settings.writes % 2)
        self._write_settings(begun)
        yield
        unfinished = begun == settings
        self._write_settings(_written(begun, frontends_move=frontends_move or unfinished))


def _written(settings: Settings, *, frontends_move: bool) -> Settings:
    """The settings after a write. One that was left unfinished may have moved frontends too."""
    moves = settings.frontend_moves
    return settings._replace(
        writes=settings.writes + settings.writes % 2,
        frontend_moves=moves + 1 if frontends_move or not moves else moves,
    )
