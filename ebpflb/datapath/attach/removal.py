# SPDX-License-Identifier: Apache-2.0
"""Removes one state directory: attachments first, so that no program runs with half of the maps."""

from ebpflb.datapath.attach import tcx
from ebpflb.datapath.attach.clsact import Clsact
from ebpflb.datapath.attach.tcx import Tcx
from ebpflb.datapath.maps import unknown_pins
from ebpflb.datapath.maps.state_dir import StateDir, remove_tree


def unpin_all(state: StateDir) -> None:
    """Removes filters only from devices of the caller's network namespace. Raises KernelError."""
    if not state.directory.is_dir():
        return
    unknown_pins.remove(state)
    for attacher in (Clsact(state.devices_directory), Tcx(state.devices_directory)):
        attacher.detach_others(set())
    for pin in state.links():
        tcx.detach(pin)
    for directory in (state.devices_directory, state.links_directory, state.directory):
        remove_tree(directory)
