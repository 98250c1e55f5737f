# SPDX-License-Identifier: Apache-2.0
"""Programs at the cgroup, by pinned links: they serve on while no agent runs.

A link that is there is updated in place, so that no connection ever finds the hook empty (with
detach and attach 4 % of the connections failed in a trial). A link that has lost its cgroup, or
sits on another one, is made anew.
"""

import errno
import os
from collections.abc import Collection
from pathlib import Path

from ebpflb.datapath import kernel
from ebpflb.datapath.maps.pins import StateDir
from ebpflb.datapath.programs.loader import SECTIONS, Program
from ebpflb.errors import KernelError, NodeError


def cgroup_root() -> Path:
    """The root of cgroup v2, also where it is mounted beside v1 (hybrid hosts).

    Raises NodeError where cgroup v2 is not mounted.
    """
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _device, mount, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(mount)
    raise NodeError("cgroup v2 is not mounted: mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")


def attach(state: StateDir, cgroup: Path, programs: list[Program]) -> None:
    """Puts every program in force at the cgroup, replacing what we attached before.

    Raises KernelError; then nothing new is attached, and what was attached before still is,
    though some of it may be in its new form.
    """
    made: list[Path] = []
    target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for program in programs:
            pin = state.links_directory / program.name
            if not _replaced(pin, target, program):
                _attach(pin, target, program)
                made.append(pin)
    except KernelError:
        for pin in made:
            pin.unlink()
        raise
    finally:
        os.close(target)


def attached(state: StateDir) -> dict[str, int]:
    """Program name -> program id, for every link in force."""
    found = {path.name: kernel.get(str(path)) for path in state.links()}
    return {name: _program_id(fd) for name, fd in found.items() if fd is not None}


def foreign(cgroup: Path, ours: Collection[int]) -> dict[str, list[str]]:
    """Section -> names of other agents' programs that run at this cgroup, parents included.

    ``ours`` are ids of our own programs; those of another ebpflb go by the same names as ours
    and count as foreign only if they are not in it.
    """
    target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ids = {s: kernel.query(target, a.point, effective=True) for s, a in SECTIONS.items()}
    finally:
        os.close(target)
    others = {s: [program_name(i) for i in found if i not in ours] for s, found in ids.items()}
    return {section: names for section, names in others.items() if names}


def program_name(prog_id: int) -> str:
    """A program's name and id, for people."""
    fd = kernel.prog_by_id(prog_id)
    try:
        name: bytes = kernel.ffi.string(kernel.info(fd, "prog_info").name)
    finally:
        os.close(fd)
    return f"{name.decode()} #{prog_id}"


def _replaced(pin: Path, target: int, program: Program) -> bool:
    """Whether the link of this pin carries the program now; else there is no such link."""
    link = kernel.get(str(pin))
    if link is None:
        return False
    try:
        if _sits_on(link, target) and _updated(link, program):
            return True
    finally:
        os.close(link)
    pin.unlink()
    return False


def _updated(link: int, program: Program) -> bool:
    """False where the link's cgroup is gone (ENOLINK)."""
    try:
        kernel.link_update(link, program.fd)
    except KernelError as error:
        if error.errno == errno.ENOLINK:
            return False
        raise
    return True


def _attach(pin: Path, target: int, program: Program) -> None:
    link = kernel.link_create(program.fd, target, program.point)
    try:
        kernel.pin(link, str(pin))
    finally:
        os.close(link)


def _sits_on(link: int, target: int) -> bool:
    return bool(kernel.info(link, "link_info").cgroup == os.fstat(target).st_ino)


def _program_id(link: int) -> int:
    try:
        return int(kernel.info(link, "link_info").program)
    finally:
        os.close(link)
