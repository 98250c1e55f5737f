# SPDX-License-Identifier: Apache-2.0
"""Remove unknown objects from a state directory; a start or a cleanup would fail at them.

A pin is known by its kind and its name, as the attachers and ``state_dir`` create them.
"""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.maps import map_sizes, state_dir
from ebpflb.kernel.maps.state_dir import StateDir, remove_tree

NOT_PINS = (state_dir.RECORD, map_sizes.SIZES_LINK)

log = logging.getLogger(__name__)

# How /proc names a pinned object. Unknown names, of a later kernel, are not looked for.
_MAP, _PROGRAM = "anon_inode:bpf-map", "anon_inode:bpf-prog"
_LINKS = ("anon_inode:bpf-link", "anon_inode:bpf_link")
_NUMBER = r"[0-9]{1,10}"
_AT_DEVICE = re.compile(rf"{_NUMBER}-(ingress|egress)")
_OF_CLSACT = re.compile(rf"{_NUMBER}-(clsact|qdisc)")


def remove(state: StateDir) -> None:
    """Remove the unknown objects; log a line for each."""
    for pin in list(_unknown(state)):
        log.warning("removed %s, which no agent put there", pin)
        if pin.is_dir() and not pin.is_symlink():
            remove_tree(pin)
        else:
            pin.unlink()


def _unknown(state: StateDir) -> Iterator[Path]:
    yield from (p for p in _entries(state.directory) if not p.is_dir() and p.name not in NOT_PINS)
    yield from (pin for pin in _entries(state.links_directory) if _is_one_of((_MAP, _PROGRAM), pin))
    for pin in _entries(state.devices_directory):
        if _OF_CLSACT.fullmatch(pin.name):
            if not pin.is_dir() or any(pin.iterdir()):
                yield pin
        elif not _AT_DEVICE.fullmatch(pin.name) or _is_one_of((_MAP, _PROGRAM), pin):
            yield pin
    for folder in (state.maps_directory, state.persistent_directory):
        yield from (pin for pin in _entries(folder) if _is_one_of((*_LINKS, _PROGRAM), pin))


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_one_of(kinds: tuple[str, ...], pin: Path) -> bool:
    """Whether an object of these kinds is pinned, or a directory.

    Unreadable ones are left alone.
    """
    if pin.is_dir():
        return True
    try:
        opened = bpf.get(str(pin))
    except KernelError:
        return False
    if opened is None:
        return False
    try:
        return os.readlink(f"/proc/self/fd/{opened}") in kinds
    finally:
        os.close(opened)
