# SPDX-License-Identifier: Apache-2.0
"""What an agent leaves to the next one at a clean stop counts once, and only if it must be true."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebpflb.kernel.map_writer import CAPACITY, MapWriter
from ebpflb.kernel.maps import clean_stop, state_record
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.clean_stop import CleanStop
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.options import Paths
from ebpflb.plan.planner import Planner
from tests.kernel.variants import needs_root
from tests.plan import builders

pytestmark = needs_root

TABLE = b"generation"


class Node:
    """A state directory with its maps, a run directory, and an agent's planner."""

    def __init__(self, home: StateDir, run: Path, patch: pytest.MonkeyPatch) -> None:
        run.mkdir()
        self.patch, self.home, self.paths = patch, home, Paths(home.directory, run)
        home.prepare()
        self.maps: dict[str, Map] = {}
        self.start()
        self.planner = Planner(CAPACITY)

    def start(self) -> None:
        """Open the maps, as an agent does."""
        self.close()
        self.maps = self.home.open_maps()

    def close(self) -> None:
        for each in self.maps.values():
            each.close()

    def serve(self, *backends: int) -> None:
        """Write a Service with these backends."""
        desired = builders.desired("web", [1], list(backends))
        plan = self.planner.plan_changes({desired.name: desired}, 0.0)
        MapWriter(self.maps).apply(plan)
        self.planner.written(0.0)

    def stop(self) -> None:
        clean_stop.write(self.paths, self.maps, CleanStop(self.planner.contents(), TABLE))

    def take(self) -> CleanStop | None:
        return clean_stop.take(self.paths, self.home, self.maps)


@pytest.fixture
def node(home: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(home, tmp_path / "run", monkeypatch)
    made.serve(1, 2)
    yield made
    made.close()


def test_it_is_what_the_maps_hold(node: Node) -> None:
    """The next agent gets the contents as it would read them, and what identifies nft's table."""
    node.stop()
    node.start()
    left = node.take()
    assert left == CleanStop(MapWriter(node.maps).read_contents(), TABLE)
    assert not node.paths.contents_file.exists()


def test_it_counts_once(node: Node) -> None:
    """An agent that is killed after its start leaves nothing, even if it wrote nothing."""
    node.stop()
    assert node.take()
    assert node.take() is None


def written(node: Node) -> None:
    """Another agent has changed the Service, and was killed."""
    node.serve(1, 2, 3)


def written_half(node: Node) -> None:
    """Another agent was killed while it wrote."""
    settings = node.maps["settings"].get(0)
    node.maps["settings"].write([(0, settings._replace(writes=settings.writes + 1))])


def other_version(node: Node) -> None:
    """Another version may know the maps by other rules."""
    node.patch.setattr(clean_stop, "VERSION", "0.0.9")


def new_map(node: Node) -> None:
    """A pin was removed, so the map is a new one."""
    next(node.home.directory.glob("*/slots")).unlink()
    node.start()


def other_sizes(node: Node) -> None:
    """The maps with the usual sizes are not those with --map-size."""
    node.home = StateDir(node.home.directory, (("slots", 1 << 20),))
    node.home.prepare()
    node.start()


def old_layout(node: Node) -> None:
    """The programs of another layout still choose, by other maps."""
    (node.home.directory / "0123456789ab").mkdir()


def half_a_file(node: Node) -> None:
    file = node.paths.contents_file
    file.write_bytes(file.read_bytes()[:-1])


def other_file(node: Node) -> None:
    """A file of another boot, or of another node: its digest is not the one beside the maps."""
    file = node.paths.contents_file
    before = file.read_bytes()
    node.serve(1)
    node.stop()
    file.write_bytes(before)


def no_file(node: Node) -> None:
    node.paths.contents_file.unlink()


def no_digest(node: Node) -> None:
    """After a boot the bpffs is empty."""
    (node.paths.state / state_record.DIGEST_LINK).unlink()


def too_large(node: Node) -> None:
    """A file that would take too much memory is not read."""
    with node.paths.contents_file.open("r+b") as file:
        file.truncate(clean_stop.MOST_BYTES + 1)


@pytest.mark.parametrize(
    "spoil",
    [
        written,
        written_half,
        other_version,
        new_map,
        other_sizes,
        old_layout,
        half_a_file,
        other_file,
        no_file,
        no_digest,
        too_large,
    ],
)
def test_it_is_not_trusted(node: Node, spoil: Callable[[Node], None]) -> None:
    """Whatever else has happened, the maps are read, and nothing is left for a later agent."""
    node.stop()
    spoil(node)
    assert node.take() is None
    assert not node.paths.contents_file.exists()
    assert node.take() is None


def test_nothing_is_left_after_a_failed_write(node: Node) -> None:
    """An agent that could not complete a write does not know what the maps hold."""
    written_half(node)
    node.stop()
    assert not node.paths.contents_file.exists()
    assert node.take() is None


@contextmanager
def mounted(where: Path, *how: str) -> Iterator[None]:
    """Something is mounted there meanwhile."""
    subprocess.run(["mount", *how, where], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", where], check=True)


def test_full_disk(node: Node) -> None:
    """The agent stops all the same, and the next one reads the maps."""
    run = node.paths.run
    with mounted(run, "-t", "tmpfs", "-o", "size=4k", "none"):
        (run / "other").write_bytes(bytes(4096))
        node.stop()
        assert [path.name for path in run.iterdir()] == ["other"]
        assert node.take() is None


def test_read_only_state(node: Node) -> None:
    """While the digest can neither be written nor removed, nothing is trusted or left."""
    node.stop()
    state = node.paths.state
    with mounted(state, "--bind", str(state)):
        subprocess.run(["mount", "-o", "remount,bind,ro", state], check=True)
        assert node.take() is None
        node.stop()
        assert not node.paths.contents_file.exists()
    assert node.take() is None
