# SPDX-License-Identifier: Apache-2.0
"""The state directory: which maps are adopted, created, and removed."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps import layout, state_dir
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import MapSpec
from ebpflb.kernel.maps.state_dir import StateDir
from tests.kernel.variants import needs_root, open_files

pytestmark = needs_root

SPEC = MapSpec("small", "HASH", "__u32", "__u32", 8, ("NONE",))
SPECS = {"small": SPEC}
Open = Callable[..., dict[str, Map]]


@pytest.fixture
def opening(home: StateDir) -> Iterator[Open]:
    """Opens maps of the state directory, and closes them after the test."""
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


def test_upgrade(home: StateDir, opening: Open) -> None:
    """Another layout's persistent maps are adopted if their layout is the same; no others are."""
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


def test_adopted(opening: Open) -> None:
    """A pinned map that fits is adopted, with its entries."""
    first = opening()["small"]
    first.write([(1, 2)])
    again = opening()["small"]
    assert map_id(again) == map_id(first)
    assert dict(again.items()) == {1: 2}


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


def test_looking(home: StateDir, opening: Open) -> None:
    """``read_maps`` opens the same maps, with arrays that cannot be written."""
    opening(layout.MAPS)
    found = home.read_maps()
    assert set(found) == set(layout.MAPS)
    with pytest.raises(TypeError):
        found["slots"].write([(0, found["slots"].get(0))])
    for map_ in found.values():
        map_.close()


def test_remove(home: StateDir, opening: Open) -> None:
    """Maps, links, old layouts and the directory itself are removed."""
    opening()
    pin_other(home.links_directory / "connect4", state_dir.create_map(SPEC))
    (home.directory / "0123456789ab").mkdir()
    pin_other(home.directory / "0123456789ab" / "small", state_dir.create_map(SPEC))
    unpin_all(home)
    assert not home.directory.exists()
    assert not home.exists()


def test_forget_old_layouts(home: StateDir, opening: Open) -> None:
    """Maps of other layouts are removed; this layout's maps and all links stay."""
    opening()
    pin_other(home.links_directory / "connect4", state_dir.create_map(SPEC))
    (home.directory / "0123456789ab").mkdir()
    pin_other(home.directory / "0123456789ab" / "services", state_dir.create_map(SPEC))
    assert [path.name for path in home.old_layouts()] == ["0123456789ab"]
    home.remove_old_layouts()
    kept = {home.maps_directory, home.persistent_directory}
    kept |= {home.links_directory, home.devices_directory}
    assert set(home.directory.iterdir()) == kept
    assert [path.name for path in home.links()] == ["connect4"]
    assert [path.name for path in home.maps_directory.iterdir()] == ["small"]


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
    """If there is no bpffs at its usual place, one is mounted; tried in a mount namespace."""
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
