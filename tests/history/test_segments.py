# SPDX-License-Identifier: Apache-2.0
"""The files: for root alone, and nothing that lies in their place stops an agent."""

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.errors import NodeError
from ebpflb.history import segments
from ebpflb.history.past import Past
from ebpflb.history.segments import Begun
from ebpflb.options import Paths
from tests.history.fakes import Node
from tests.kit.hostile_files import HOSTILE, lay

NO_HISTORY: dict[str, Callable[[Path], object]] = {
    **HOSTILE,
    "a link to a file": lambda path: path.symlink_to("/etc/passwd"),
}


def test_for_root_alone(tmp_path: Path) -> None:
    """Only root may read the files."""
    node = Node(tmp_path)
    node.history.stop()
    (path,) = segments.paths_of(node.paths)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["garbage", "a pipe", "a directory", "a link to a file", "holes"])
def test_what_is_no_history(tmp_path: Path, kind: str) -> None:
    """What lies in place of a file is named by a reader, and the agent records beside it."""
    place = tmp_path / "state.00000007.history"
    lay(NO_HISTORY[kind], place)
    node = Node(tmp_path)
    node.maps["backend_slots"].write([(1, 1)])
    node.history.stop()
    past = Past(node.paths)
    assert [str(place) in note for note in past.notes] == [True]
    assert len(list(past.syncs())) == 1


def test_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent goes on without a history, says so once, and records again when there is space."""
    node = Node(tmp_path)
    node.history.commit()
    real = os.write
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
        for number in range(3):
            node.maps["backend_slots"].write([(number, number)])
            node.history.commit()
    assert caplog.text.count(os.strerror(errno.ENOSPC)) == 1
    monkeypatch.setattr("ebpflb.history.recorder.FILE_RETRY_SECONDS", 0.0)
    node.history.next_try = 0.0
    node.history.commit()
    node.checkpoint()
    node.maps["backend_slots"].write([(9, 9)])
    node.history.stop()
    past = Past(node.paths)
    held = {name: each.packed for name, each in past.at(node.clock()).maps.items() if each.packed}
    assert held == node.contents()


def test_a_run_directory_that_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When it is there again a new file begins with what the maps hold; nothing is kept open."""
    (run := tmp_path / "run").mkdir()
    node = Node(run)
    node.maps["backend_slots"].write([(1, 1)])
    node.history.commit()
    shutil.rmtree(run)
    node.maps["backend_slots"].write([(2, 2)])
    node.history.commit()
    run.mkdir()
    node.maps["backend_slots"].write([(3, 3)])
    with caplog.at_level(logging.WARNING):
        node.history.commit()
        node.checkpoint()
        node.maps["backend_slots"].write([(4, 4)])
        node.history.stop()
    assert caplog.messages == ["history: its files were removed: a new one begins"]
    past = Past(node.paths)
    held = {name: each.packed for name, each in past.at(node.clock()).maps.items() if each.packed}
    assert held == node.contents()
    assert len(list(past.syncs())) == 2
    assert not descriptors(tmp_path)


def descriptors(folder: Path) -> set[str]:
    """The files of histories in a folder that this process has open."""
    links = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
    start = f"{folder}/"
    return {
        text for link in links if ".history" in (text := _target(link)) and text.startswith(start)
    }


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


@pytest.mark.parametrize("fault", ["the disk is full", "it is half full", "old files stay"])
def test_a_file_that_cannot_begin_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A file that cannot be begun leaves neither a descriptor nor a file, at every attempt."""
    paths, real = Paths(Path("/state"), tmp_path), os.write

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        if fault == "old files stay":
            broken.setattr(segments, "forget", fail)
        elif fault == "the disk is full":
            broken.setattr(os, "write", fail)
        else:
            broken.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
        for _ in range(3):
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                segments.new(paths, Begun(0.0, "layout", "version", True))
    assert (segments.paths_of(paths), descriptors(tmp_path)) == ([], set())


def test_no_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a run directory nothing is recorded, and nothing fails."""
    with caplog.at_level(logging.WARNING):
        node = Node(tmp_path / "gone")
    node.maps["backend_slots"].write([(1, 1)])
    node.history.stop()
    assert "nothing is recorded" in caplog.text
    with pytest.raises(NodeError, match="no history in"):
        Past(node.paths)


def test_others_stay(tmp_path: Path) -> None:
    """Files of another agent in the same directory are not read or deleted."""
    other = tmp_path / "state-2.00000001.history"
    other.write_text("not ours to judge")
    Node(tmp_path).history.stop()
    assert other.exists()
