# SPDX-License-Identifier: Apache-2.0
"""Whatever replaces an agent's files, each command ends and reports the problem in one line."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir, remove_tree
from ebpflb.options import Paths
from tests.cli.conftest import Ebpflb
from tests.kit.hostile_files import HOSTILE, lay

LONGEST = 60  # seconds of a command
COMMANDS = {
    "status": ("status",),
    "history": ("history",),
    "maps dump": ("maps", "dump", "--all"),
    "flows list": ("flows", "list"),
    "check": ("check",),
    "cleanup": ("cleanup",),
}
WITHOUT_RUN_DIR = {"maps dump", "flows list", "check"}
PLACES: tuple[Callable[[Paths], Path], ...] = (
    lambda paths: paths.status_file,
    lambda paths: paths.lock_file,
    lambda paths: paths.ports_file,
    lambda paths: paths.liberal_file,
    lambda paths: paths.socket_file,
    lambda paths: paths.monitor_socket,
    lambda paths: paths.history_file,
)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """End a command that does not end by itself."""

    def end(*_: object) -> None:
        pytest.fail(f"it has not ended within {LONGEST} s")

    former = signal.signal(signal.SIGALRM, end)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Paths]:
    """Return a state directory and a run directory as an agent has left them."""
    directory = BPFFS / f"ebpflb-test-{os.getpid()}-hostile"
    Datapath(StateDir(directory)).close()
    (tmp_path / "run").mkdir(mode=0o700)
    left = Paths(directory, tmp_path / "run")
    state_dir.write_record(left)
    yield left
    remove_tree(directory)


def run_all(ebpflb: Ebpflb, paths: Paths, *, named: bool) -> dict[str, list[str]]:
    """Return the lines on stderr by command; the directory is named, or found by its record."""
    said = {}
    for name, words in COMMANDS.items():
        run = ("--run-dir", paths.run) if named and name not in WITHOUT_RUN_DIR else ()
        signal.alarm(LONGEST)
        done = ebpflb(*words, "--state-dir", paths.state, *run)
        signal.alarm(0)
        said[name] = done.err.splitlines()
        assert "Traceback" not in done.err + done.out, (name, done)
    return said


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_each_hostile_file_is_named_at_most_once(
    ebpflb: Ebpflb, paths: Paths, make: Callable[[Path], None]
) -> None:
    """If all files are replaced by one hostile kind, each command names each file at most once, and
    cleanup succeeds.
    """
    places = [place(paths) for place in PLACES]
    for path in places:
        lay(make, path)
    for name, lines in run_all(ebpflb, paths, named=True).items():
        for path in places:
            assert len([line for line in lines if str(path) in line]) <= 1, (name, lines)
        assert len(lines) <= 3, (name, lines)
    assert not paths.state.exists()


RECORDS: dict[str, Callable[[Path], None]] = {
    "garbage": lambda path: path.symlink_to(b"\xff\x1b[31m\n:/x".decode(errors="surrogateescape")),
    "a loop": lambda path: path.symlink_to(path),
    "a directory": Path.mkdir,
    "another directory": lambda path: path.symlink_to(f"/dev/null:{path.parent}"),
    "of a device": lambda path: path.symlink_to(f"/dev/zero:{path.parent}"),
}


@pytest.mark.parametrize("make", RECORDS.values(), ids=RECORDS)
def test_the_record_of_the_run_directory(
    ebpflb: Ebpflb, paths: Paths, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    """An invalid record is treated as missing, and a path that is not a directory is named."""
    monkeypatch.setattr(Paths, "run", paths.run)  # the default
    record = paths.state / state_dir.RECORD
    record.unlink()
    lay(make, record)
    for name, lines in run_all(ebpflb, paths, named=False).items():
        assert len(lines) <= 2, (name, lines)
