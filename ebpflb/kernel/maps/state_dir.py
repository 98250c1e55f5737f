# SPDX-License-Identifier: Apache-2.0
"""The state directory in a bpffs, where maps and links are pinned.

    <state-dir>/<layout hash>/<map>     maps; a new layout never reads an old map
    <state-dir>/<persistent hash>/<map> maps that an upgrade keeps (maps/persistent.h)
    <state-dir>/links/<program>         links at the cgroup, updated in place across layouts
    <state-dir>/devices/<ifindex>-...   attachments at devices: tcx.py and clsact.py
    <state-dir>/run-dir, map-sizes      what the agent records: state_record.py

A pinned map is adopted only if the kernel reports the type, sizes, entries and flags of maps.h.
While the agent starts, the maps of a new layout are filled, and the old ones keep serving until the
links are replaced.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from ebpflb import files
from ebpflb.errors import KernelError, NodeError
from ebpflb.kernel import bpf
from ebpflb.kernel.maps import layout, state_record
from ebpflb.kernel.maps.bpf_map import Map, kernel_entries, kernel_kind, open_map
from ebpflb.kernel.maps.bpffs import mount_bpffs, why_unseen
from ebpflb.kernel.maps.creation import create_map
from ebpflb.kernel.maps.layout import MapSpec
from ebpflb.kernel.side_by_side import side_by_side
from ebpflb.model import map_sizes
from ebpflb.model.drift import Drift, Part
from ebpflb.model.map_sizes import MapSizes
from ebpflb.options import Paths


class StateDir:
    """One node's state directory."""

    def __init__(self, directory: Path = Paths.state, sizes: MapSizes | None = None) -> None:
        """``sizes``: the wanted sizes of maps; None: those in force."""
        self.directory = directory
        known = state_record.read_sizes(directory) if sizes is None else sizes
        self.sizes = layout.unusual(known)
        self.specs = layout.sized(self.sizes)
        suffix = _suffix(self.sizes)
        self.maps_directory = directory / f"{layout.layout_hash()}{suffix}"
        self.persistent_directory = directory / f"{layout.persistent_hash()}{suffix}"
        self.links_directory = directory / "links"
        self.devices_directory = directory / "devices"

    def __repr__(self) -> str:
        return f"<State {self.directory}>"

    def prepare(self) -> None:
        """Create the directories."""
        mount_bpffs(self.directory)
        for directory in self.directories():
            if directory.exists() and not directory.is_dir():
                directory.unlink()  # a pin in its place
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def exists(self) -> bool:
        return self.maps_directory.is_dir()

    def open_maps(self, specs: dict[str, MapSpec] | None = None) -> dict[str, Map]:
        """Open every map, or those of ``specs``.

        A fitting pinned map is adopted, otherwise a new one is created and pinned.
        """
        wanted = self.specs if specs is None else specs
        opening = [partial(self._adopt_or_create, spec) for spec in wanted.values()]
        fds = side_by_side(opening, os.close)
        return {name: open_map(wanted[name], fd) for name, fd in zip(wanted, fds, strict=True)}

    def is_pinned(self, spec: MapSpec) -> bool:
        """Whether ``open_maps`` would adopt this map."""
        with bpf.opened(self._pin(spec)) as fd:
            return fd is not None and _fits(fd, spec)

    def renew(self, spec: MapSpec, fill: Callable[[Map], None]) -> None:
        """Pin a new map instead of this one; no other program sees it before ``fill`` is done."""
        with closing(open_map(spec, create_map(spec))) as made:
            fill(made)
            self._pin(spec).unlink(missing_ok=True)
            bpf.pin(made.fd, str(self._pin(spec)))

    def read_maps(self) -> dict[str, Map]:
        """Open the pinned maps for reading. Raises NodeError if maps are missing or do not fit."""
        with ExitStack() as opened:
            found: dict[str, int] = {}
            for name, spec in self.specs.items():
                fd = self._get_fitting(spec)
                opened.callback(os.close, fd)
                found[name] = fd
            opened.pop_all()
        specs = self.specs
        return {name: open_map(specs[name], fd, writable=False) for name, fd in found.items()}

    def pin_faults(self, maps: Mapping[str, Map]) -> Iterator[Drift]:
        """Yield the open maps that are not the ones pinned here. Raises KernelError."""
        for name, opened in maps.items():
            if text := self._pin_fault(opened):
                yield Drift(Part.PIN, f"map {name}", text)
        if state_record.read_sizes(self.directory) != self.sizes:
            yield Drift(
                Part.PIN, f"{self.directory / state_record.SIZES_LINK}", "differs from --map-size"
            )

    def restore_pins(self, maps: Mapping[str, Map]) -> None:
        """Like ``pin_again``, and also record the sizes of the maps in force."""
        self.pin_again(maps)
        state_record.write_sizes(self.directory, self.sizes)

    def pin_again(self, maps: Mapping[str, Map]) -> None:
        """Pin these open maps again, replacing any others.

        Raises NodeError and KernelError.
        """
        self.prepare()
        for opened in maps.values():
            if self._pin_fault(opened):
                self._pin(opened.spec).unlink(missing_ok=True)
                bpf.pin(opened.fd, str(self._pin(opened.spec)))

    def map_ids(self) -> set[int]:
        """Return the ids of all pinned maps, those of other layouts included."""
        others = self.old_layouts() if self.directory.is_dir() else []
        folders = [it for it in (self.maps_directory, self.persistent_directory) if it.is_dir()]
        return {
            id for folder in (*folders, *others) for it in folder.iterdir() if (id := _map_id(it))
        }

    def links(self) -> Iterator[Path]:
        """Yield the pins of all attachments."""
        if self.links_directory.is_dir():
            yield from sorted(self.links_directory.iterdir())

    def old_layouts(self) -> list[Path]:
        """Return the directories of every other layout's maps."""
        own = self.directories()
        found = (entry for entry in self.directory.iterdir() if not entry.is_symlink())
        return [entry for entry in found if entry.is_dir() and entry not in own]

    def remove_old_layouts(self) -> None:
        """Unpin the maps of other layouts and sizes, when no program uses them any more."""
        state_record.write_sizes(self.directory, self.sizes)
        for directory in self.old_layouts():
            remove_tree(directory)

    def directories(self) -> tuple[Path, ...]:
        """Return all directories with pins."""
        maps = self.maps_directory, self.persistent_directory
        return *maps, self.links_directory, self.devices_directory

    def _pin(self, spec: MapSpec) -> Path:
        return (self.persistent_directory if spec.persistent else self.maps_directory) / spec.name

    def _pin_fault(self, opened: Map) -> str:
        """Return the fault of the pin of an open map, or ""."""
        pin = self._pin(opened.spec)
        with bpf.opened(pin) as fd:
            if fd is None:
                return f"has no pin {pin}"
            is_other = bpf.info(fd, "map_info").id != bpf.info(opened.fd, "map_info").id
        return f"is not the one that is pinned as {pin}" if is_other else ""

    def _get_fitting(self, spec: MapSpec) -> int:
        """Return the pinned map of this name.

        Raises NodeError if it is missing, or another object.
        """
        pin = self._pin(spec)
        not_ours = f"{pin} was made by another version: the next start of `ebpflb run` replaces it"
        try:
            fd = bpf.get(str(pin))
        except KernelError as error:
            raise NodeError(not_ours) from error
        if fd is None:
            has_others = pin.parent.is_dir() and any(pin.parent.iterdir())
            raise NodeError(
                f"the pin {pin} is missing: an agent with --audit=repair pins it again within"
                " seconds, otherwise the next start of `ebpflb run` does"
                if has_others
                else self.why_no_maps()
            )
        try:
            if _fits(fd, spec):
                return fd
        except KernelError:
            pass
        os.close(fd)
        raise NodeError(not_ours)

    def why_no_maps(self) -> str:
        """Return why there are no maps, and what to do."""
        if unseen := why_unseen(self.directory):
            return unseen
        where = f"there are no maps of this version in {self.directory}"
        return self.foreign_maps() or f"{where}: did `ebpflb run` start, with this --state-dir?"

    def foreign_maps(self) -> str | None:
        """Return that only another version can read the maps, and what to do, or None."""
        if self.exists() or not self.directory.is_dir() or not self.old_layouts():
            return None
        return (
            f"the maps in {self.directory} were made by another version of ebpflb: use that "
            "version's `ebpflb` (in a cluster: kubectl exec into its pod)"
        )

    def _adopt_or_create(self, spec: MapSpec) -> int:
        pin = self._pin(spec)
        fd = bpf.get(str(pin))
        if fd is not None and _fits(fd, spec):
            return fd
        if fd is not None:
            os.close(fd)
            pin.unlink()
        fd = create_map(spec)
        bpf.pin(fd, str(pin))
        return fd


def _suffix(sizes: MapSizes) -> str:
    """Return the suffix of the directories of maps with these sizes."""
    return f"-{hashlib.sha256(map_sizes.show(sizes).encode()).hexdigest()[:8]}" if sizes else ""


def _map_id(pin: Path) -> int:
    """Return the map's id; 0 for a pin of another object."""
    with suppress(KernelError), bpf.opened(pin) as fd:
        return 0 if fd is None else int(bpf.info(fd, "map_info").id)
    return 0


def _fits(fd: int, spec: MapSpec) -> bool:
    info = bpf.info(fd, "map_info")
    flags = sum(bpf.MAP_FLAGS[flag] for flag in spec.flags)
    return (info.kind, info.key_size, info.value_size, info.entries, info.flags) == (
        bpf.MAP_KINDS[kernel_kind(spec)],
        spec.key_size,
        spec.value_size,
        kernel_entries(spec),
        flags,
    )


def remove_tree(directory: Path) -> None:
    """Remove a directory with its content, if it exists; shutil.rmtree fails in a bpffs."""
    if not directory.is_dir():
        return
    for entry in directory.iterdir():
        is_directory = entry.is_dir() and not entry.is_symlink()
        remove_tree(entry) if is_directory else entry.unlink()
    directory.rmdir()


# The lock of a state directory, held on the directory itself, whatever path or mount leads to it.
#
# An agent holds the lock as long as it runs; so does a command that removes the directory. The lock
# belongs to the inode, so it holds across containers and bind mounts; only root may open the
# directory.


class StateLock:
    """The lock of one state directory, which ``take`` creates if needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._opened: int | None = None

    def take(self) -> bool:
        """Take the lock; return False if another process has it.

        Raises NodeError if there cannot be such a directory.
        """
        mount_bpffs(self.directory)
        while True:
            opened = self._open()
            if not files.lock(opened):
                os.close(opened)
                return False
            if self._is_here(opened):
                self._opened = opened
                return True
            os.close(opened)  # the directory was removed meanwhile

    def holds(self) -> bool:
        """Whether the lock is held on the directory that has the name now.

        A bpffs that was mounted again has another directory.
        """
        return self._opened is not None and self._is_here(self._opened)

    def release(self) -> None:
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None

    def _open(self) -> int:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            opened = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise NodeError(f"{self.directory}: {error.strerror}") from error
        try:
            _make_private(opened, self.directory)
        except NodeError:
            os.close(opened)
            raise
        return opened

    def _is_here(self, opened: int) -> bool:
        try:
            return os.path.samestat(os.fstat(opened), os.stat(self.directory))
        except OSError:
            return False


def _make_private(opened: int, directory: Path) -> None:
    """Refuse a directory of another user, who could hold its lock, and close it to others.

    A bpffs may let every user create directories.
    """
    found = os.fstat(opened)
    if found.st_uid not in (0, os.geteuid()):
        raise NodeError(f"{directory}: belongs to another user (uid {found.st_uid}): remove it")
    if stat.S_IMODE(found.st_mode) & 0o077:
        with suppress(PermissionError):
            os.fchmod(opened, 0o700)
