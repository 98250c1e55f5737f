# SPDX-License-Identifier: Apache-2.0
"""Removes one state directory: attachments first, so that no program runs with half of the maps."""

import os
from contextlib import suppress
from pathlib import Path

from ebpflb.datapath import kernel
from ebpflb.datapath.attach.clsact import Clsact
from ebpflb.datapath.maps.state_dir import StateDir, remove_tree
from ebpflb.errors import KernelError


def unpin_all(state: StateDir) -> None:
    """Removes filters only from devices of the caller's network namespace. Raises KernelError."""
    if not state.directory.is_dir():
        return
    Clsact(state.devices_directory).detach_others(set())
    for directory in (state.devices_directory, state.links_directory):
        for pin in directory.iterdir() if directory.is_dir() else ():
            _detach(pin)
        remove_tree(directory)
    remove_tree(state.directory)


def _detach(pin: Path) -> None:
    """Not all pins are links: some record filters. A link whose device or cgroup was removed is
    already detached.
    """
    with suppress(KernelError):
        link = kernel.get(str(pin))
        if link is not None:
            try:
                kernel.link_detach(link)
            finally:
                os.close(link)
