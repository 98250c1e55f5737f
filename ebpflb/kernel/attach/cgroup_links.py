# SPDX-License-Identifier: Apache-2.0
"""Attach programs to the cgroup by pinned links, which keep serving while no agent runs.

An existing link is updated in place, so that no connection finds the hook without a program (with
detach and attach 4 % of the connections failed in a trial). If a link's cgroup was removed, or is
another one, a new link replaces it.
"""

import errno
import logging
import os
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ebpflb.errors import EbpflbError, KernelError, NodeError
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.state_dir import StateDir, mount_of
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.loader import SECTIONS, Program
from ebpflb.model.events import Drift, Part

# Descriptors of our links: a link works while a descriptor is open, even if its pin is removed.
#
# Other programs may remove pins, or unmount the bpffs. Without a descriptor each link would be
# detached at once, and packets of open connections would not be translated until it is attached
# again.


@dataclass(frozen=True)
class HeldLink:
    """A descriptor of a link, and the inode of its pin."""

    descriptor: int
    inode: int

    @cached_property
    def id(self) -> int:
        """The link's id; the kernel reads a device's under the lock of all devices.

        While first programs are attached that takes as long as attaching one.
        """
        return int(bpf.info(self.descriptor, "link_info").id)


Pinned = Mapping[str, HeldLink]  # links that still have their pins, by the pin's name


class HeldLinks:
    """The held links by their pins; must be told of every change of a pin."""

    def __init__(self) -> None:
        self._links: dict[Path, HeldLink] = {}

    def hold(self, pins: Iterable[Path]) -> None:
        """Hold the links that have these pins now, instead of those held before.

        A link that cannot be opened is not held: its pin keeps it as before.
        """
        for pin in pins:
            with suppress(KernelError):
                inode = _inode(pin)  # first: if another pin comes now, its inode is an unknown one
                link = bpf.get(str(pin))
                if link is not None:
                    self.release([pin])
                    self._links[pin] = HeldLink(link, inode)

    def get(self, pin: Path) -> int | None:
        """Return the descriptor of the link that had this pin; the descriptor stays open here."""
        return self._links[pin].descriptor if pin in self._links else None

    def pinned(self, folder: Path) -> Pinned:
        """Return the links that still have their pins in this folder.

        One listing takes as long as opening ten pins.
        """
        with suppress(OSError), os.scandir(folder) as entries:
            inodes = {entry.name: entry.inode() for entry in entries}
            held = ((pin.name, link) for pin, link in self._links.items())
            return {name: link for name, link in held if inodes.get(name) == link.inode}
        return {}

    def pins(self) -> list[Path]:
        return list(self._links)

    def release(self, pins: Iterable[Path]) -> None:
        for pin in pins:
            if pin in self._links:
                os.close(self._links.pop(pin).descriptor)

    def restore(self, pins: Iterable[Path] | None = None) -> None:
        """Pin links again whose pin is missing: these, or all. Raises KernelError."""
        for pin in self.pins() if pins is None else pins:
            link = self.get(pin)
            if link is not None and not pin.exists():
                bpf.pin(link, str(pin))
                self.hold([pin])

    def close(self) -> None:
        self.release(self.pins())


def _inode(pin: Path) -> int:
    """Return the number of the pin's inode, which no other pin had since the boot; 0: no pin."""
    try:
        return os.stat(pin).st_ino
    except OSError:
        return 0


CGROUP_HOOKS = tuple(section.partition("/")[2] for section in SECTIONS)  # programs and pins


def cgroup_root(chosen: Path | None = None) -> Path:
    """Return the root of cgroup v2, which may be mounted in addition to v1 (hybrid hosts).

    ``chosen`` overrides it: a cgroup of version 2, or a directory with such a mount below it, such
    as /sys/fs/cgroup of a hybrid host. Raises NodeError if cgroup v2 is not mounted.
    """
    if chosen and mount_of(chosen.absolute())[1] == "cgroup2":
        return chosen
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = [Path(mount) for _device, mount, kind, *_ in lines if kind == "cgroup2"]
    if chosen:
        return next((it for it in found if chosen.absolute() in it.parents), chosen)
    if not found:
        where = "/sys/fs/cgroup/unified"
        raise NodeError(f"cgroup v2 is not mounted: mount -t cgroup2 cgroup2 {where}")
    return found[0]


def cgroup_of(state: StateDir) -> Path:
    """Return the cgroup of the hooks, as in /proc/PID/cgroup; the root if it is unknown."""
    with bpf.opened(state.links_directory / "connect4") as link:
        if link is None:
            return Path("/")
        wanted = bpf.info(link, "link_info").cgroup
    with suppress(NodeError):
        root = cgroup_root()
        for folder, _, _ in os.walk(root):
            if os.stat(folder).st_ino == wanted:
                return Path("/") / Path(folder).relative_to(root)
    return Path("/")


def attach(state: StateDir, cgroup: Path, programs: list[Program]) -> None:
    """Attach every program to the cgroup, replacing those of an earlier agent.

    Raises KernelError; then no new link exists and the links of an earlier agent stay, but some of
    them may already have the new program.
    """
    made: list[Path] = []
    with opened(cgroup) as target:
        try:
            for program in programs:
                pin = state.links_directory / program.name
                if not _update_pinned(pin, target, program):
                    _attach(pin, target, program)
                    made.append(pin)
        except KernelError:
            for pin in made:
                pin.unlink()
            raise


def attached(state: StateDir) -> dict[str, int]:
    """Return program name -> program id for every attached link; a pin may outlive its link."""
    links = {pin.name: _link_info(pin) for pin in state.links()}
    return {name: link.program for name, link in links.items() if link and link.cgroup}


def faults(
    state: StateDir,
    cgroup: Path | None,
    ours: Mapping[str, int] | None = None,
    held: HeldLinks | None = None,
) -> list[Drift]:
    """Return the hooks that are not attached to this cgroup, have no pin, or run another program.

    ``cgroup``: None for any. ``ours``: program name -> program id; None: any id. A link without a
    pin is looked up in ``held``. Raises KernelError, and OSError if there is no such cgroup.
    """
    number = cgroup.stat().st_ino if cgroup else None
    pins = [state.links_directory / name for name in CGROUP_HOOKS]
    return [drift for pin in pins for drift in _faults(pin, number, ours, held)]


def _faults(
    pin: Path, cgroup: int | None, ours: Mapping[str, int] | None, held: HeldLinks | None
) -> Iterator[Drift]:
    name, link = f"hook {pin.name}", _link_info(pin)
    if link is None:
        yield Drift(Part.PIN, name, f"has no pin {pin}")
        kept = held.get(pin) if held else None
        link = None if kept is None else bpf.info(kept, "link_info")
    if not link or not link.cgroup or cgroup not in (None, link.cgroup):
        yield Drift(Part.HOOK, name, "is not attached")
    elif ours is not None and link.program != ours.get(pin.name):
        yield Drift(Part.HOOK, name, f"runs program #{link.program}, which is not the agent's")


def foreign_programs(cgroup: Path, our_maps: Collection[int]) -> dict[str, list[str]]:
    """Return section -> names of other programs that run at this cgroup, parents included.

    ``our_maps`` are the ids of the state directory's maps. Each of our programs uses one of them,
    even a program without a pin; programs of another ebpflb use none of them.
    """
    with opened(cgroup) as target:
        ids = {s: bpf.query(target, a.attach_type, effective=True) for s, a in SECTIONS.items()}
    others = {
        section: [program_name(id) for id in found if _maps_of(id).isdisjoint(our_maps)]
        for section, found in ids.items()
    }
    return {section: names for section, names in others.items() if names}


def _maps_of(prog_id: int) -> set[int]:
    with bpf.closing(bpf.prog_by_id(prog_id)) as program:
        return bpf.map_ids(program)


def program_name(prog_id: int) -> str:
    """Return a program's name and id, for the operator; without CAP_SYS_ADMIN only the id."""
    try:
        with bpf.closing(bpf.prog_by_id(prog_id)) as program:
            name: bytes = bpf.ffi.string(bpf.info(program, "prog_info").name)
    except KernelError as error:
        if error.errno == errno.EPERM:
            return f"#{prog_id}"
        raise
    return f"{name.decode()} #{prog_id}"


def _update_pinned(pin: Path, target: int, program: Program) -> bool:
    """Update the pinned link; return False if there is no link that can be updated."""
    with bpf.opened(pin) as link:
        if link is None:
            return False
        is_here = bpf.info(link, "link_info").cgroup == os.fstat(target).st_ino
        if is_here and update_link(link, program):
            return True
    pin.unlink()
    return False


def update_link(link: int, program: Program) -> bool:
    """Return False if the link's cgroup or device was removed (ENOLINK)."""
    try:
        bpf.link_update(link, program.fd)
    except KernelError as error:
        if error.errno == errno.ENOLINK:
            return False
        raise
    return True


def _attach(pin: Path, target: int, program: Program) -> None:
    with bpf.closing(bpf.link_create(program.fd, target, program.attach_type)) as link:
        bpf.pin(link, str(pin))


def _link_info(pin: Path) -> Any:
    """Return the kernel's information about a pinned link; None if there is none."""
    with bpf.opened(pin) as link:
        return None if link is None else bpf.info(link, "link_info")


def opened(cgroup: Path) -> AbstractContextManager[int]:
    return bpf.closing(os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY))


# The cookie of our network namespace, by which the hooks recognize the node's own sockets.
#
# On kernels without SO_NETNS_COOKIE (5.14) bpf/hooks/netns_cookie.c reads the cookie: it is
# attached during one call of getsockname(), and changes the result only for a socket with its mark.

log = logging.getLogger(__name__)

COOKIE_SOURCE = "hooks/netns_cookie.c"
MARK = 0x65626C62  # COOKIE_MARK in netns_cookie.c


def netns_cookie(cache: Path) -> int | None:
    """Return the cookie, or None if neither the kernel nor the program can read it."""
    cookie = namespaces.own_cookie()
    if cookie is not None:
        return cookie
    try:
        return cookie_by_program(cache)
    except (EbpflbError, OSError) as error:
        log.debug("the netns cookie program failed: %s", error)
        return None


def cookie_by_program(cache: Path) -> int:
    """Read the cookie with an eBPF program.

    Raises CompileError, VerifierError, KernelError or OSError.
    """
    with cookie_program(cache), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
        address, port = asking.getsockname()
    low = int.from_bytes(socket.inet_aton(address), "little")
    return socket.htons(port) << 32 | low


@contextmanager
def cookie_program(cache: Path) -> Iterator[None]:
    """Attach the program without a pin: the kernel removes the link if this process ends."""
    attach = loader.HOOK_TYPES[loader.GETSOCKNAME4]
    code = compiler.compile_source(COOKIE_SOURCE, cache=cache).programs["netns_cookie"]
    with (
        opened(cgroup_root()) as cgroup,
        bpf.closing(loader.load_one("netns_cookie", attach, code)) as program,
        bpf.closing(bpf.link_create(program, cgroup, attach.attach_type)),
    ):
        yield
