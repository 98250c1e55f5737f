# SPDX-License-Identifier: Apache-2.0
"""One node's maps and programs, as the agent uses them.

The order in which an agent uses it:

Datapath          opens the maps in the state directory, or creates them
load              compiles the programs, or takes them from the cache, and loads them
attach            attaches the programs in place of the old ones
exchange          attaches programs of another variant, or the usual ones again
attach_devices    attaches programs to new devices, and detaches them from others
take_attached     notes the devices that have got programs meanwhile
faults            lists attachments and pins that are missing or changed
restore           puts them back

map_writer has the operations on the maps.
"""

import resource
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ebpflb.entries.services import NO_FLAGS, Flags
from ebpflb.errors import KernelError
from ebpflb.kernel import bpf, probe
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.cgroup_links import HeldLinks
from ebpflb.kernel.attach.device_programs import DevicePrograms
from ebpflb.kernel.map_writer import NETFILTER, MapWriter
from ebpflb.kernel.maps.layout import MapSpec
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.maps.sweep import Gate
from ebpflb.kernel.programs import compiler, precompile
from ebpflb.kernel.programs.loader import Bytecode, Program, ProgramSet
from ebpflb.model.devices import Devices
from ebpflb.model.events import Drift
from ebpflb.plan.map_contents import MapContents

# The programs' sources, and the compiler's flags for them on this kernel.


SOCKET_SOURCE, PACKET_SOURCE = "hooks/socket.c", "hooks/packet.c"
# By whether packets have a link header; packets without one begin with the IP header.
LINK_VARIANTS = {True: (), False: ("-DNO_LINK_HEADER",)}


def socket_flags() -> tuple[str, ...]:
    """Return the compiler's flags for the socket hooks on this kernel."""
    return ("-DHAVE_SET_RETVAL",) if probe.set_retval() else ()


def guard_flags() -> tuple[str, ...]:
    """Return the additional flags of the bind guard, which must be able to set an errno."""
    return ("-DHAVE_KERNEL_READ",) if probe.set_retval() and probe.kernel_read() else ()


def socket_variant(more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return all flags for the socket hooks; with ``more`` they name the process, if they can."""
    usual = (*socket_flags(), *guard_flags())
    named = (precompile.PROCESS,) if more and usual and probe.process() else ()
    return (*usual, *more, *named)


def packet_flags() -> tuple[str, ...]:
    """Return the compiler's flags for the packet hooks on this kernel."""
    return ("-DHAVE_COARSE_CLOCK",) if probe.coarse_clock() else ()


_ATTACHING = frozenset({"attaching"})
_MANY = 16  # devices


class Datapath(MapWriter):
    """The maps and programs of one state directory; ``devices``: the packet programs' devices."""

    def __init__(
        self,
        state: StateDir,
        specs: dict[str, MapSpec] | None = None,
        *,
        on_attached: Callable[[], None] | None = None,
    ) -> None:
        """Open the maps. Raises NodeError or KernelError if they cannot be opened.

        ``specs``: maps to open instead of the usual ones. ``on_attached`` as in DevicePrograms.
        """
        with suppress(ValueError, OSError):  # before 5.11; not allowed in a container
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
        state.prepare()
        self.state = state
        super().__init__(state.open_maps(specs))
        self._draw_secret()
        self.usual: ProgramSet | None = None  # None: an earlier agent's programs keep serving
        self.others: ProgramSet | None = None  # in force instead of the usual ones
        self.held = HeldLinks()
        self.held.hold((*state.links(), *state.devices_directory.iterdir()))  # an earlier agent's
        self.devices = DevicePrograms(state, self._packet_programs, self.held, on_attached)
        self.wants_egress = True  # whether the next attachment is for both hooks of the devices
        # Until all devices have a program at egress the flow tables open no flows: replies to a
        # flow may leave by a device without (see SETTING_ATTACHING).
        unfinished = self._settings().flags >= _ATTACHING
        self._flags = _ATTACHING if unfinished or not cgroup_links.attached(state) else NO_FLAGS

    def close(self) -> None:
        """Close all descriptors; pinned maps and links keep serving."""
        self.devices.close()
        self.held.close()
        self._close_programs()
        for opened in self.maps.values():
            opened.close()

    def read_contents(self) -> MapContents:
        """Return the content of the maps, and the backends chosen by programs of another layout."""
        contents = super().read_contents()
        if self.netfilter and self.state.old_layouts():
            contents.former_translations = self.netfilter.read_former()
        return contents

    def load(self, cache: Path) -> bool:
        """Load the programs; return whether they had to be compiled.

        Raises CompileError, VerifierError, KernelError or NodeError; the programs loaded before
        stay.
        """
        code = self.compile(cache)
        self.host_netns = cgroup_links.netns_cookie(cache) or self._settings().host_netns
        loaded = ProgramSet(code, self.maps, egress=self.wants_egress)
        self.devices.forget()
        self._close_programs()
        self.usual = loaded
        return not all(compiled.cached for compiled in (code.sockets, *code.packets.values()))

    def compile(self, cache: Path, *, more: tuple[str, ...] = ()) -> Bytecode:
        """Return the bytecode for ``load``, which then finds it in the cache.

        ``more`` flags choose another variant. Safe in any thread. Raises CompileError.
        """
        flags = packet_flags()
        sockets = compiler.compile_source(SOCKET_SOURCE, socket_variant(more), cache=cache)
        packets = {
            link_header: compiler.compile_source(PACKET_SOURCE, flags + bare + more, cache=cache)
            for link_header, bare in LINK_VARIANTS.items()
        }
        return Bytecode(sockets, packets)

    def _close_programs(self) -> None:
        for programs in (self.usual, self.others):
            if programs:
                programs.close()
        self.usual = self.others = None

    def _packet_programs(self, link_header: bool) -> list[Program]:
        programs = self.others or self.usual
        return programs.packets(link_header, egress=self.devices.egress) if programs else []

    @property
    def _socket_programs(self) -> list[Program]:
        programs = self.others or self.usual
        return programs.sockets if programs else []

    @property
    def programs(self) -> list[Program]:
        """The programs that this agent has loaded; empty while an earlier agent's keep serving."""
        return [it for programs in (self.usual, self.others) if programs for it in programs.loaded]

    def attach(
        self, cgroup: Path, served: Devices, now: Collection[int] | None = None
    ) -> dict[str, str]:
        """Attach the loaded programs, and unpin maps of other layouts; return device -> error.

        ``now``: indexes of the devices that must not wait for others; None: all.

        Raises KernelError if they cannot be attached to the cgroup, and NodeError if the state
        directory was removed after the maps were opened and cannot be created again.
        """
        self.state.pin_again(self.maps)
        if not self.held.pins():
            Gate(self.maps).close_if_empty()
        self._attach_sockets(cgroup)
        self._choose_egress()
        self.devices.update(served, now)
        self.state.remove_old_layouts()
        self._end_attaching()
        return dict(self.devices.failed)

    @property
    def is_attaching(self) -> bool:
        """Whether many devices wait for a program that they have not had."""
        return len(self.devices.to_come | self.devices.lack_egress) > _MANY

    @property
    def flows_wait(self) -> bool:
        """Whether the flow tables open no flow, because a device may lack a program at egress."""
        return bool(self._flags)

    @property
    def opens_no_flow(self) -> bool:
        """Whether no packet opens a flow: the flow tables wait, netfilter does not translate."""
        return self.flows_wait and not self._settings().flags & NETFILTER

    @property
    def has_needless_egress(self) -> bool:
        """Whether programs are attached at egress that nothing wants."""
        return self.devices.egress and not self._needs_egress

    @property
    def _needs_egress(self) -> bool:
        return self.wants_egress or Gate(self.maps).is_open

    def _choose_egress(self) -> None:
        """Decide on the programs at egress.

        Before they are removed no flow may be opened any more. Programs that run at this moment may
        still open one, so the removal is left to the next call.
        """
        may_open = not self.flows_wait
        self.devices.egress = may_open or self._needs_egress
        if may_open and not self._needs_egress:
            self._set_flags(_ATTACHING)

    def take_attached(self) -> dict[str, str]:
        """Note the devices that have got programs; return device -> error. Raises KernelError."""
        failed = self.devices.take_attached()
        self._end_attaching()
        return failed

    def _end_attaching(self) -> None:
        if self.flows_wait and self._needs_egress and self.devices.has_egress:
            if self.netfilter:
                self.netfilter.hold_ports()
            self._set_flags(NO_FLAGS)

    def _set_flags(self, flags: Flags) -> None:
        former, self._flags = self._flags, flags
        try:
            self.write_settings(self._asked)
        except KernelError:
            self._flags = former
            raise

    def exchange(self, others: ProgramSet | None, cgroup: Path, served: Devices) -> dict[str, str]:
        """Attach other programs instead of the loaded ones, or these again; return device -> error.

        Each link's program is replaced atomically. The programs that are not attached stay loaded.
        Raises KernelError or OSError: then the usual programs are in force, or the next ``restore``
        puts them in force, and ``others`` is still open.
        """
        self.devices.forget()
        former, self.others = self.others, others
        try:
            self._attach_sockets(cgroup)
        except (KernelError, OSError):
            self.others = None
            with suppress(KernelError, OSError):
                self._attach_sockets(cgroup)
            raise
        finally:
            failed = self.devices.update(served, ())
            if former:
                former.close()
        return failed

    def attach_devices(self, served: Devices) -> dict[str, str]:
        """Attach the programs to these devices and no others; return device -> error.

        Devices without programs get them later: see ``take_attached``.
        """
        self._choose_egress()
        failed = self.devices.update(served, ())
        self._end_attaching()
        return failed

    def faults(self, cgroup: Path, served: Devices) -> Iterator[Iterable[Drift]]:
        """Yield, in steps, attachments and pins that differ from ``attach`` and ``attach_devices``.

        Raises KernelError, and OSError if there is no such cgroup.
        """
        ours = {p.name: int(bpf.info(p.fd, "prog_info").id) for p in self._socket_programs}
        yield cgroup_links.faults(self.state, cgroup, ours or None, self.held)
        yield self.state.pin_faults(self.maps)
        yield from self.devices.faults(served)

    def restore(self, cgroup: Path, served: Devices) -> dict[str, str]:
        """Pin and attach again what others have removed or replaced; return device -> error.

        If no programs are loaded only the pins can be restored. Raises KernelError, and NodeError
        if the state directory cannot be created again.
        """
        self.state.restore_pins(self.maps)
        self.held.restore()
        if not self.usual:
            return {}
        self._attach_sockets(cgroup)
        return self.devices.restore(served)

    def _attach_sockets(self, cgroup: Path) -> None:
        cgroup_links.attach(self.state, cgroup, self._socket_programs)
        self.held.hold(self.state.links())

    def is_attached(self) -> bool:
        """Whether programs of this layout are already attached, at devices too."""
        attached = cgroup_links.attached(self.state) and self.devices.recorded
        return bool(attached) and not self.state.old_layouts()
