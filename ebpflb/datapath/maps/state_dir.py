# SPDX-License-Identifier: Apache-2.0
"""The state directory in a bpffs, where maps and links are pinned.

    <state-dir>/<layout hash>/<map>     maps; a new layout never reads an old map
    <state-dir>/<persistent hash>/<map> maps that an upgrade keeps (maps/persistent.h)
    <state-dir>/links/<program>         links at the cgroup, updated in place across layouts
    <state-dir>/devices/<ifindex>-...   attachments at devices: tcx.py and clsact.py

A pinned map is adopted only if the kernel reports the type, sizes, entries and flags of maps.h.
While the agent starts, the maps of a new layout are filled, and the old ones keep serving until
the links are replaced.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ebpflb.datapath import kernel
from ebpflb.datapath.maps import layout
from ebpflb.datapath.maps.bpf_map import Map, create_map, open_map
from ebpflb.datapath.maps.layout import MapSpec
from ebpflb.errors import NodeError

BPFFS = Path("/sys/fs/bpf")
DEFAULT = BPFFS / "ebpflb"


def _mount_of(path: Path) -> tuple[Path, str]:
    """The mount point of ``path``, which need not exist, and the type; the last mount counts."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    holding = [(m, kind) for m, kind in mounts if path == Path(m) or Path(m) in path.parents]
    mount, kind = max(reversed(holding), key=lambda found: len(found[0]))
    return Path(mount), kind


def mount_bpffs(path: Path) -> None:
    """Mounts a bpffs at its usual place if ``path`` is there and none is mounted yet.

    Raises NodeError if ``path`` is not in a bpffs, or mounting fails. It also refuses to mount in a
    container on the host's directory: only the container would see that mount, and it would be
    lost with the container.
    """
    mount, kind = _mount_of(path)
    if kind == "bpf":
        return
    if mount == BPFFS:
        raise NodeError(f"{BPFFS} is the host's, and not a bpffs: mount one there, on the host")
    if BPFFS not in (path, *path.parents):
        raise NodeError(f"{path} is not in a bpffs: choose a --state-dir below {BPFFS}")
    done = subprocess.run(
        ["mount", "-t", "bpf", "bpf", str(BPFFS)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NodeError(f"no bpffs at {BPFFS}, and mounting one failed: {done.stderr.strip()}")


class StateDir:
    """One node's state directory."""

    def __init__(self, directory: Path = DEFAULT) -> None:
        self.directory = directory
        self.maps_directory = directory / layout.layout_hash()
        self.persistent_directory = directory / layout.persistent_hash()
        self.links_directory = directory / "links"
        self.devices_directory = directory / "devices"

    def __repr__(self) -> str:
        return f"<State {self.directory}>"

    def prepare(self) -> None:
        """Makes the directories."""
        mount_bpffs(self.directory)
        for directory in self._directories():
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def exists(self) -> bool:
        return self.maps_directory.is_dir()

    def open_maps(self, specs: dict[str, MapSpec] = layout.MAPS) -> dict[str, Map]:
        """Every map: adopted if a pin fits, else created and pinned."""
        return {name: open_map(spec, self._adopt_or_create(spec)) for name, spec in specs.items()}

    def read_maps(self) -> dict[str, Map]:
        """The pinned maps, to be read only. Raises NodeError if there are none."""
        found = {name: kernel.get(str(self._pin(spec))) for name, spec in layout.MAPS.items()}
        missing = [name for name, fd in found.items() if fd is None]
        if missing:
            raise NodeError(f"no maps of this version in {self.directory}: did `ebpflb run` start?")
        return {
            name: open_map(layout.MAPS[name], fd, writable=False)
            for name, fd in found.items()
            if fd is not None
        }

    def links(self) -> Iterator[Path]:
        """The pins of all attachments."""
        if self.links_directory.is_dir():
            yield from sorted(self.links_directory.iterdir())

    def old_layouts(self) -> list[Path]:
        """The directories of every other layout's maps."""
        return [entry for entry in self.directory.iterdir() if entry not in self._directories()]

    def remove_old_layouts(self) -> None:
        """Unpins the maps of other layouts. To be called when no program uses them any more."""
        for directory in self.old_layouts():
            remove_tree(directory)

    def _directories(self) -> tuple[Path, ...]:
        maps = self.maps_directory, self.persistent_directory
        return *maps, self.links_directory, self.devices_directory

    def _pin(self, spec: MapSpec) -> Path:
        return (self.persistent_directory if spec.persistent else self.maps_directory) / spec.name

    def _adopt_or_create(self, spec: MapSpec) -> int:
        path = str(self._pin(spec))
        fd = kernel.get(path)
        if fd is not None and _fits(fd, spec):
            return fd
        if fd is not None:
            os.close(fd)
            os.unlink(path)
        fd = create_map(spec)
        kernel.pin(fd, path)
        return fd


def _fits(fd: int, spec: MapSpec) -> bool:
    info = kernel.info(fd, "map_info")
    flags = sum(kernel.MAP_FLAGS[flag] for flag in spec.flags)
    return (info.kind, info.key_size, info.value_size, info.entries, info.flags) == (
        kernel.MAP_KINDS[spec.kind],
        spec.key_size,
        spec.value_size,
        spec.entries,
        flags,
    )


def remove_tree(directory: Path) -> None:
    """Removes a directory with its content, if it exists; shutil.rmtree fails in a bpffs."""
    if not directory.is_dir():
        return
    for entry in directory.iterdir():
        remove_tree(entry) if entry.is_dir() else entry.unlink()
    directory.rmdir()
