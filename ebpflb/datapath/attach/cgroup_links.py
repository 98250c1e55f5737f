# SPDX-License-Identifier: Apache-2.0
"""Attaches programs to the cgroup by pinned links, which keep serving while no agent runs.

An existing link is updated in place, so that no connection finds the hook without a program (with
detach and attach 4 % of the connections failed in a trial). A link whose cgroup was removed, or is
another one, is replaced by a new link.
"""

import errno
import os
from collections.abc import Collection
from pathlib import Path

from ebpflb.datapath import kernel
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.datapath.programs.loader import SECTIONS, Program
from ebpflb.errors import KernelError, NodeError


def cgroup_root() -> Path:
    """The root of cgroup v2, also if it is mounted in addition to v1 (hybrid hosts).

    Raises NodeError if cgroup v2 is not mounted.
    """
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _device, mount, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(mount)
    raise NodeError("cgroup v2 is not mounted: mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")


def attach(state: StateDir, cgroup: Path, programs: list[Program]) -> None:
    """Attaches every program to the cgroup, in place of those of an earlier agent.

    Raises KernelError; then no link is new, and those of an earlier agent are still there, though
    some of them may carry the new program.
    """
    made: list[Path] = []
    target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
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
    finally:
        os.close(target)


def attached(state: StateDir) -> dict[str, int]:
    """Program name -> program id, for every attached link."""
    found = {path.name: kernel.get(str(path)) for path in state.links()}
    return {name: _program_id(fd) for name, fd in found.items() if fd is not None}


def foreign_programs(cgroup: Path, ours: Collection[int]) -> dict[str, list[str]]:
    """Section -> names of other agents' programs that run at this cgroup, parents included.

    ``ours`` are the ids of our own programs; the programs of another ebpflb have the same names
    as ours, and are told apart by their ids.
    """
    target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ids = {s: kernel.query(target, a.attach_type, effective=True) for s, a in SECTIONS.items()}
    finally:
        os.close(target)
    others = {s: [program_name(i) for i in found if i not in ours] for s, found in ids.items()}
    return {section: names for section, names in others.items() if names}


def program_name(prog_id: int) -> str:
    """A program's name and id, for the operator."""
    fd = kernel.prog_by_id(prog_id)
    try:
        name: bytes = kernel.ffi.string(kernel.info(fd, "prog_info").name)
    finally:
        os.close(fd)
    return f"{name.decode()} #{prog_id}"


def _update_pinned(pin: Path, target: int, program: Program) -> bool:
    """Updates the pinned link. False if there is no such link, or none that can be updated."""
    link = kernel.get(str(pin))
    if link is None:
        return False
    try:
        if _is_at(link, target) and _update_link(link, program):
            return True
    finally:
        os.close(link)
    pin.unlink()
    return False


def _update_link(link: int, program: Program) -> bool:
    """False if the link's cgroup was removed (ENOLINK)."""
    try:
        kernel.link_update(link, program.fd)
    except KernelError as error:
        if error.errno == errno.ENOLINK:
            return False
        raise
    return True


def _attach(pin: Path, target: int, program: Program) -> None:
    link = kernel.link_create(program.fd, target, program.attach_type)
    try:
        kernel.pin(link, str(pin))
    finally:
        os.close(link)


def _is_at(link: int, target: int) -> bool:
    return bool(kernel.info(link, "link_info").cgroup == os.fstat(target).st_ino)


def _program_id(link: int) -> int:
    try:
        return int(kernel.info(link, "link_info").program)
    finally:
        os.close(link)
