# SPDX-License-Identifier: Apache-2.0
"""The lock of a state directory, and what is recorded there of its agent."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb import files
from ebpflb.errors import NodeError
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir, StateLock
from ebpflb.options import Paths


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
    """A directory that was created again has another lock, and the old lock's holder notices."""
    assert lock.take()
    directory.rmdir()
    assert not lock.holds()
    other = StateLock(directory)
    assert other.take()
    other.release()


def test_nobody_else_may_open_it(directory: Path, lock: StateLock) -> None:
    """Whoever may open a directory may hold its lock; one of an earlier version is open to all."""
    directory.mkdir(mode=0o755)
    assert lock.take()
    assert directory.stat().st_mode & 0o777 == 0o700


def test_another_users_directory(directory: Path, lock: StateLock) -> None:
    """A bpffs may let everybody make directories; such a one is refused by name."""
    directory.mkdir()
    os.chown(directory, 65534, 65534)
    with pytest.raises(NodeError, match=f"{directory}: belongs to another user"):
        lock.take()


def test_a_lock_for_a_moment(
    directory: Path, lock: StateLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that looks whether an agent runs does not keep one from starting."""
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
    """A senseless record counts as none."""
    directory.mkdir()
    (directory / state_dir.RECORD).symlink_to(text)
    assert state_dir.read_record(directory) is None
    (directory / state_dir.RECORD).unlink()
    assert state_dir.read_record(directory) is None
