# SPDX-License-Identifier: Apache-2.0
"""The state directory: which maps are adopted, created and removed."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpflb import files
from ebpflb.errors import NodeError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps import layout, state_dir
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import MapSpec
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir, StateLock
from ebpflb.options import Paths
from tests.kernel.variants import needs_root, open_files

pytestmark = needs_root

SPEC = MapSpec("small", "HASH", "__u32", "__u32", 8, ("NONE",))
SPECS = {"small": SPEC}
Open = Callable[..., dict[str, Map]]


@pytest.fixture
def opening(home: StateDir) -> Iterator[Open]:
    """Open maps of the state directory, and close them after the test."""
    opened: list[Map] = []

    def open_maps(specs: dict[str, MapSpec] = SPECS) -> dict[str, Map]:
        found = home.open_maps(specs)
        opened.extend(found.values())
        return found

    yield open_maps
    for map_ in opened:
        map_.close()


def map_id(map_: Map) -> int:
    return int(bpf.info(map_.fd, "map_info").id)


def pin_other(path: Path, fd: int) -> None:
    bpf.pin(fd, str(path))
    os.close(fd)


def test_only_maps_of_the_same_layout_are_adopted(home: StateDir, opening: Open) -> None:
    """If the layout differs, only persistent maps whose own layout is the same are adopted."""
    specs = {name: SPEC._replace(name=name) for name in ("small", "other")}
    specs["persistent"] = SPEC._replace(name="persistent", persistent=True)
    former = {name: map_id(opened) for name, opened in opening(specs).items()}
    home.maps_directory.rename(home.directory / "0123456789ab")
    home.prepare()
    found = {name: map_id(opened) for name, opened in opening(specs).items()}
    assert found["persistent"] == former["persistent"]
    assert not {found["small"], found["other"]} & set(former.values())
    home.remove_old_layouts()
    assert home.persistent_directory.is_dir()
    assert not (home.directory / "0123456789ab").exists()


@pytest.mark.parametrize(
    "other",
    [
        SPEC._replace(kind="LRU_HASH"),
        SPEC._replace(key="__u64"),
        SPEC._replace(value="__u64"),
        SPEC._replace(entries=9),
        SPEC._replace(flags=("NO_PREALLOC",)),
        SPEC._replace(flags=("RDONLY_PROG",)),
    ],
)
def test_wrong_pin(home: StateDir, opening: Open, other: MapSpec) -> None:
    """A pin of another kind, size, length or flags is replaced, never written to."""
    pin_other(home.maps_directory / "small", state_dir.create_map(other))
    opened = opening()["small"]
    info = bpf.info(opened.fd, "map_info")
    assert (info.kind, info.key_size, info.value_size, info.entries, info.flags) == (1, 4, 4, 8, 0)
    assert map_id(opening()["small"]) == map_id(opened)


def test_read_maps_opens_read_only_arrays(home: StateDir, opening: Open) -> None:
    """``read_maps`` opens the same maps; the memory of arrays cannot be written."""
    opening(layout.MAPS)
    found = home.read_maps()
    assert set(found) == set(layout.MAPS)
    with pytest.raises(TypeError):
        found["backend_slots"].write([(0, found["backend_slots"].get(0))])
    for map_ in found.values():
        map_.close()


def test_the_whole_directory_is_removed(home: StateDir, opening: Open) -> None:
    """Maps, links, old layouts and the directory itself are removed."""
    opening()
    pin_other(home.links_directory / "connect4", state_dir.create_map(SPEC))
    (home.directory / "0123456789ab").mkdir()
    pin_other(home.directory / "0123456789ab" / "small", state_dir.create_map(SPEC))
    unpin_all(home)
    assert not home.directory.exists()
    assert not home.exists()


def test_no_bpffs(tmp_path: Path) -> None:
    """A directory that is not in a bpffs is refused with a hint."""
    with pytest.raises(NodeError, match="choose a --state-dir below /sys/fs/bpf"):
        StateDir(tmp_path / "state").prepare()
    assert not (tmp_path / "state").exists()


MOUNTED_ANEW = """
import subprocess, sys
from pathlib import Path
from ebpflb.kernel.maps.state_dir import BPFFS
from ebpflb.kernel.maps.state_dir import StateDir
subprocess.run(["umount", BPFFS], check=True)
StateDir(Path(sys.argv[1])).prepare()
mounts = Path("/proc/self/mounts").read_text()
assert f" {BPFFS} bpf " in mounts and (Path(sys.argv[1]) / "links").is_dir()
"""


def test_bpffs_is_mounted(directory: Path) -> None:
    """If no bpffs is at its usual place, one is mounted; the test uses a mount namespace."""
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTED_ANEW, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not directory.exists()


def test_no_leak(home: StateDir) -> None:
    """Opening and closing, adopting and replacing leave no descriptor open."""
    pin_other(home.maps_directory / "small", state_dir.create_map(SPEC._replace(entries=9)))
    before = open_files()
    for _ in range(3):
        for map_ in home.open_maps(SPECS).values():
            map_.close()
    assert open_files() == before


# The lock of a state directory, and what is recorded there of its agent.


@pytest.fixture
def lock(directory: Path) -> Iterator[StateLock]:
    made = StateLock(directory)
    yield made
    made.release()
    if directory.is_dir():
        directory.rmdir()


def test_one_holder(directory: Path, lock: StateLock) -> None:
    """Only one process holds the lock until it is released."""
    assert not files.is_locked(directory)
    assert lock.take() and lock.holds()
    assert files.is_locked(directory)
    assert not StateLock(directory).take()
    lock.release()
    assert not files.is_locked(directory) and not lock.holds()
    assert lock.take()


def test_the_same_directory_by_another_mount(
    directory: Path, lock: StateLock, tmp_path: Path
) -> None:
    """The lock belongs to the inode, not to the path: a container mounts the same directory."""
    assert lock.take()
    subprocess.run(["mount", "--bind", str(BPFFS), str(tmp_path)], check=True)
    try:
        assert files.is_locked(tmp_path / directory.name)
        assert not StateLock(tmp_path / directory.name).take()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_directory_made_anew(directory: Path, lock: StateLock) -> None:
    """A directory that was created again has another lock, and the holder of the old lock
    notices.
    """
    assert lock.take()
    directory.rmdir()
    assert not lock.holds()
    other = StateLock(directory)
    assert other.take()
    other.release()


def test_nobody_else_may_open_it(directory: Path, lock: StateLock) -> None:
    """Only root may open the directory, because whoever opens it can hold its lock. An earlier
    version's directory is open to all.
    """
    directory.mkdir(mode=0o755)
    assert lock.take()
    assert directory.stat().st_mode & 0o777 == 0o700


def test_another_users_directory(directory: Path, lock: StateLock) -> None:
    """A bpffs may let every user make directories; another user's directory is refused by name."""
    directory.mkdir()
    os.chown(directory, 65534, 65534)
    with pytest.raises(NodeError, match=f"{directory}: belongs to another user"):
        lock.take()


def test_a_lock_for_a_moment(
    directory: Path, lock: StateLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that tests whether an agent runs does not keep an agent from starting."""
    directory.mkdir()
    other = os.open(directory, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_SH)
    monkeypatch.setattr("ebpflb.files.time.sleep", lambda _: os.close(other))
    assert lock.take()


@pytest.fixture
def recorded(directory: Path, tmp_path: Path) -> Paths:
    paths = Paths(directory, tmp_path / "run: here")
    StateDir(directory).prepare()
    state_dir.write_record(paths)
    return paths


def test_the_run_directory_is_found(directory: Path, recorded: Paths) -> None:
    """The state directory alone leads to the last agent's run directory."""
    assert state_dir.read_record(directory) == recorded
    state_dir.write_record(recorded)
    other = Paths(directory, Path("/other"))
    state_dir.write_record(other)
    assert state_dir.read_record(directory) == other


@pytest.mark.parametrize("text", ["/run", "run:/sys/fs/bpf/x", ":", "/run:/elsewhere"])
def test_a_record_that_makes_no_sense(directory: Path, text: str) -> None:
    """An invalid record is treated as missing."""
    directory.mkdir()
    (directory / state_dir.RECORD).symlink_to(text)
    assert state_dir.read_record(directory) is None
    (directory / state_dir.RECORD).unlink()
    assert state_dir.read_record(directory) is None
