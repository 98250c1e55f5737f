# SPDX-License-Identifier: Apache-2.0
"""The state directory in a bpffs, where maps and links are pinned.

    <state-dir>/<layout hash>/<map>     maps; a new layout never reads an old map
    <state-dir>/<persistent hash>/<map> maps that an upgrade keeps (maps/persistent.h)
    <state-dir>/links/<program>         links at the cgroup, updated in place across layouts
    <state-dir>/devices/<ifindex>-...   attachments at devices: tcx.py and clsact.py
    <state-dir>/run-dir, map-sizes      what the agent records

A pinned map is adopted only if the kernel reports the type, sizes, entries and flags of maps.h.
While the agent starts, the maps of a new layout are filled, and the old ones keep serving until the
links are replaced.
"""

import hashlib
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from ebpflb import child, files
from ebpflb.errors import KernelError, NodeError, instead_of_os_error
from ebpflb.kernel import bpf
from ebpflb.kernel.bpf import MAP_FLAGS
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.bpf_map import Map, kernel_entries, kernel_kind, open_map
from ebpflb.kernel.maps.layout import MapSpec, ffi
from ebpflb.model import addresses
from ebpflb.model.addresses import MapSizes
from ebpflb.model.events import Drift, Part
from ebpflb.options import Paths
from ebpflb.workers import side_by_side

# The bpffs that holds state directories: where it is mounted, and why one is not seen.


BPFFS = Path("/sys/fs/bpf")
_MOUNT = f"mount -t bpf bpf {BPFFS}"
_NAMED = 4  # state directories named in one line


def mount_of(path: Path) -> tuple[Path, str]:
    """Return the mount point of ``path``, which need not exist, and its type.

    The last mount counts.
    """
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = {str(it) for it in (path, *path.parents)}
    holding = [(mount, kind) for mount, kind in mounts if mount in above]
    mount, kind = max(reversed(holding), key=lambda found: len(found[0]))
    return Path(mount), kind


def why_unseen(path: Path) -> str:
    """Return why there is no such state directory, and what to do; "" if there is one."""
    mount, kind = mount_of(path.resolve())
    if path.is_dir() and kind == "bpf":
        return ""
    if hidden := why_hidden(path):
        return hidden
    if kind != "bpf":
        is_mounted = mount_of(BPFFS) == (BPFFS, "bpf")
        help = f"give a --state-dir below {BPFFS}" if is_mounted else f"mount one ({_MOUNT})"
        return (
            f"{path} is not in a bpffs here ({mount} is of type {kind}): {help}, or in a cluster "
            "use `kubectl exec` into ebpflb's pod"
        )
    if others := state_directories(mount):
        named = " or ".join(map(str, others[:_NAMED])) + (" or ..." if others[_NAMED:] else "")
        return f"there is no state directory {path}: give --state-dir {named}"
    return f"there is no state directory {path}: did `ebpflb run` start, with this --state-dir?"


def why_hidden(path: Path) -> str:
    """Return what to do if `ip netns exec` hides the bpffs; "" if it does not.

    `ip netns exec` mounts a sysfs over the machine's, and names it after the network namespace.
    """
    if mount_of(path) != (Path("/sys"), "sysfs"):
        return ""
    lines = map(str.split, Path("/proc/self/mounts").read_text().splitlines())
    name = [line[0] for line in lines if line[1] == "/sys"][-1]
    if not Path("/run/netns", name).exists():
        return ""
    helps = f"run `nsenter --net=/run/netns/{name} ebpflb ...` instead"
    return f"`ip netns exec` hides {path}: {helps}"


def state_directories(mount: Path) -> list[Path]:
    """Return the state directories of agents in this bpffs, at its root or one directory below."""
    return sorted(it.parent for depth in ("*", "*/*") for it in mount.glob(f"{depth}/links"))


def mount_bpffs(path: Path) -> None:
    """Mount a bpffs at its usual place if ``path`` is there and none is mounted yet.

    Raises NodeError if ``path`` is not in a bpffs, or mounting fails. It also refuses to mount in a
    container on the host's directory: only the container would see that mount, and the mount would
    be lost with the container.
    """
    mount, kind = mount_of(path)
    if kind == "bpf":
        return
    if mount == BPFFS:
        raise NodeError(f"{BPFFS} is the host's, and not a bpffs: mount one there, on the host")
    if BPFFS not in (path, *path.parents):
        hint = f"mount one there (mount -t bpf bpf DIR), or choose a --state-dir below {BPFFS}"
        raise NodeError(f"{path} is not in a bpffs: {hint}")
    with instead_of_os_error(f"no bpffs at {BPFFS}, and no mount(8)"):
        done = child.run(["mount", "-t", "bpf", "bpf", str(BPFFS)])
    if done.returncode:
        raise NodeError(f"no bpffs at {BPFFS}, and mounting one failed: {done.stderr.strip()}")


# Create a map as its line in maps.h defines it.


def create_map(spec: MapSpec) -> int:
    """Create a map as defined by its line in maps.h. Raises KernelError."""
    with ExitStack() as opened:
        types = _NO_TYPES
        if spec.value in LOCKED:
            types = opened.enter_context(bpf.closing(bpf.btf_load(_btf(spec.value)))), 1, 3
        return bpf.map_create(
            name=spec.name,
            kind=kernel_kind(spec),
            sizes=(spec.key_size, spec.value_size),
            entries=kernel_entries(spec),
            flags=sum(MAP_FLAGS[flag] for flag in spec.flags),
            types=types,
        )


# Values that programs lock: the kernel must know their type (Documentation/bpf/btf.rst).
#
# The kernel finds the lock by the name of its struct, bpf_spin_lock, and forbids programs any other
# use of it.

LOCKED = ("struct rotation", "struct socket_place")  # each has a field "lock"
_NO_TYPES = (0, 0, 0)
_INT, _STRUCT = 1 << 24, 4 << 24  # kinds, in a type's info; the low bits: number of members
_BITS = 32  # of each number
_STRINGS = b"\0__u32\0bpf_spin_lock\0value\0lock\0"


def _name(text: str) -> int:
    return _STRINGS.index(b"\0" + text.encode() + b"\0") + 1


def _btf(value: str) -> bytes:
    """Return types 1 to 3: the number, the lock, and the value, of which only the lock is named."""
    words = [_name("__u32"), _INT, 4, _BITS]
    words += [_name("bpf_spin_lock"), _STRUCT | 1, 4, _name("lock"), 1, 0]
    words += [_name("value"), _STRUCT | 1, ffi.sizeof(value)]
    words += [_name("lock"), 2, 8 * ffi.offsetof(value, "lock")]
    types = struct.pack(f"={len(words)}I", *words)
    sizes = (0, len(types), len(types), len(_STRINGS))
    return struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, *sizes) + types + _STRINGS


# What an agent records in its state directory: its directories and sizes of maps.
#
# A bpffs has no ordinary files, but symbolic links; so a record is the text of a link without a
# target:
#
#     <state-dir>/run-dir   -> "<run-dir>:<state-dir>"
#     <state-dir>/map-sizes -> "backends=262144,flows=1048576"
#
# The state directory's name is recorded too, as the agent sees it: inside a container the same
# directories may lie below a mount point such as /host. Sizes are recorded when maps have them; a
# node with the sizes of maps.h has no such record.


RECORD = "run-dir"
SIZES_LINK = "map-sizes"


def write_record(paths: Paths) -> None:
    """Write the record. Raises OSError."""
    if not is_record_of(paths):
        link = paths.state / RECORD
        link.unlink(missing_ok=True)
        link.symlink_to(_record_text(paths))


def is_record_of(paths: Paths) -> bool:
    """Whether these paths are recorded."""
    with suppress(OSError):
        return os.readlink(paths.state / RECORD) == _record_text(paths)
    return False


def _record_text(paths: Paths) -> str:
    return f"{paths.run}:{paths.state}"


def read_record(state: Path, cache: Path = Paths.cache) -> Paths | None:
    """Return the paths of the state directory's agent, as seen here; None if none are recorded."""
    try:
        run, _, recorded = os.readlink(state / RECORD).rpartition(":")
    except OSError:
        return None
    if not (os.path.isabs(run) and os.path.isabs(recorded) and str(state).endswith(recorded)):
        return None
    prefix = str(state).removesuffix(recorded)
    name = "" if not prefix else Paths(Path(recorded)).name
    return Paths(state, Path(f"{prefix}{run}"), cache, known_as=name)


def write_sizes(state: Path, sizes: MapSizes) -> None:
    """Record the sizes that the maps have. Raises OSError."""
    if read_sizes(state) != sizes:
        (state / SIZES_LINK).unlink(missing_ok=True)
        if sizes:
            (state / SIZES_LINK).symlink_to(addresses.show_map_sizes(sizes))


def read_sizes(state: Path) -> MapSizes:
    """Return the recorded sizes; empty if none can be read."""
    with suppress(OSError, ValueError):
        return addresses.parse_map_sizes(os.readlink(state / SIZES_LINK))
    return ()


class StateDir:
    """One node's state directory."""

    def __init__(self, directory: Path = Paths.state, sizes: MapSizes | None = None) -> None:
        """``sizes``: the wanted sizes of maps; None: those in force."""
        self.directory = directory
        known = read_sizes(directory) if sizes is None else sizes
        self.sizes = layout.unusual(known)
        self.specs = layout.sized(self.sizes)
        suffix = _suffix(self.sizes)
        self.maps_directory = directory / f"{layout.layout_hash()}{suffix}"
        self.persistent_directory = directory / f"{layout.persistent_hash()}{suffix}"
        self.links_directory = directory / "links"
        self.devices_directory = directory / "devices"

    def prepare(self) -> None:
        """Create the directories."""
        mount_bpffs(self.directory)
        for directory in self.directories():
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

    def read_maps(self, specs: dict[str, MapSpec] | None = None) -> dict[str, Map]:
        """Open the pinned maps (all, or only those in ``specs``) for reading.

        Raises NodeError if a map is missing or does not fit.
        """
        specs = self.specs if specs is None else specs
        with ExitStack() as opened:
            found: dict[str, int] = {}
            for name, spec in specs.items():
                fd = self._get_fitting(spec)
                opened.callback(os.close, fd)
                found[name] = fd
            opened.pop_all()
        return {name: open_map(specs[name], fd, writable=False) for name, fd in found.items()}

    def pin_faults(self, maps: Mapping[str, Map]) -> Iterator[Drift]:
        """Yield the open maps that are not the ones pinned here. Raises KernelError."""
        for name, opened in maps.items():
            if text := self._pin_fault(opened):
                yield Drift(Part.PIN, f"map {name}", text)
        if read_sizes(self.directory) != self.sizes:
            yield Drift(Part.PIN, f"{self.directory / SIZES_LINK}", "differs from --map-size")

    def restore_pins(self, maps: Mapping[str, Map]) -> None:
        """Like ``pin_again``, and also record the sizes of the maps in force."""
        self.pin_again(maps)
        write_sizes(self.directory, self.sizes)

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
        write_sizes(self.directory, self.sizes)
        for directory in self.old_layouts():
            remove_tree(directory)

    def directories(self) -> tuple[Path, ...]:
        """Return all directories with pins."""
        maps = self.maps_directory, self.persistent_directory
        return *maps, self.links_directory, self.devices_directory

    def unpin(self, specs: dict[str, MapSpec]) -> None:
        """Remove maps that nobody needs any more."""
        for spec in specs.values():
            self._pin(spec).unlink(missing_ok=True)

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
        pin, fd = self._pin(spec), None
        with suppress(KernelError):
            fd = bpf.get(str(pin))
            if fd is not None and _fits(fd, spec):
                return fd
        if fd is not None:
            os.close(fd)
        if pin.exists():
            raise NodeError(
                f"{pin} was made by another version: the next start of `ebpflb run` replaces it"
            )
        has_others = pin.parent.is_dir() and any(pin.parent.iterdir())
        raise NodeError(
            f"the pin {pin} is missing: an agent with --audit=repair pins it again within seconds,"
            " otherwise the next start of `ebpflb run` does"
            if has_others
            else self.why_no_maps()
        )

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
    return (
        f"-{hashlib.sha256(addresses.show_map_sizes(sizes).encode()).hexdigest()[:8]}"
        if sizes
        else ""
    )


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
        with instead_of_os_error(str(self.directory)):
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            opened = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
