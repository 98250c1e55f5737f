# SPDX-License-Identifier: Apache-2.0
"""The agent's words, its lock, and how others tell whether it lives."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from ebpflb.errors import NodeError
from ebpflb.options import Paths
from ebpflb.serve import status


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(state=Path("/sys/fs/bpf/here"), run=tmp_path / "run" / "deeper")


@pytest.fixture
def held(paths: Paths) -> Iterator[IO[str]]:
    """An agent lives."""
    with status.lock(paths) as lock:
        yield lock


def words(**more: object) -> status.AgentStatus:
    return status.AgentStatus(pid=1, node="n", source="s", started="now", **more)  # type: ignore[arg-type]


def test_first_words() -> None:
    """A new agent tells who it is, and that it has nothing yet."""
    said = status.introduce(node="node-1", source="manifests in /m")
    assert (said.pid, said.node, said.source) == (os.getpid(), "node-1", "manifests in /m")
    assert not said.complete
    assert said.programs == "current"


def test_nobody_has_run(paths: Paths) -> None:
    """Where no agent has ever run there are no words, and nobody lives."""
    assert status.read(paths) is None
    assert not status.alive(paths)


def test_said_is_read(paths: Paths, held: IO[str]) -> None:
    """What is written is what is read, troubles and all."""
    said = words(troubles={"api": "gone"}, unplaced={"a/b": "full"}, failed="no", complete=True)
    status.write(paths, said)
    assert status.read(paths) == said


def test_nothing_new_is_not_written(paths: Paths, held: IO[str]) -> None:
    """Words that the file has already cost nothing; what could not be written is tried again."""
    said = status.write(paths, words())
    paths.status_file.unlink()
    assert status.write(paths, words(), said) == said
    assert status.read(paths) is None
    paths.status_file.mkdir()
    said = status.write(paths, words(backends=1), said)
    paths.status_file.rmdir()
    status.write(paths, words(backends=1), said)
    assert status.read(paths) == words(backends=1)


def test_last_words_count(paths: Paths, held: IO[str]) -> None:
    """Words replace words, and no half of a file is left beside them."""
    for count in (1, 2):
        status.write(paths, words(backends=count))
    assert status.read(paths) == words(backends=2)
    assert {path.suffix for path in paths.run.iterdir()} == {".json", ".lock"}


def test_garbage(paths: Paths, held: IO[str]) -> None:
    """A file that is none of ours is no words."""
    paths.status_file.write_text("{")
    assert status.read(paths) is None


def test_unwritable(paths: Paths) -> None:
    """A folder that is not there costs the status and nothing else."""
    status.write(paths, words())
    assert status.read(paths) is None


def test_alive(paths: Paths, held: IO[str]) -> None:
    """An agent lives as long as it holds its lock; its words outlive it."""
    status.write(paths, words())
    assert status.alive(paths)
    held.close()
    assert not status.alive(paths)
    assert status.read(paths) == words()


def test_second_is_refused(paths: Paths, held: IO[str]) -> None:
    """A second agent is told who serves what."""
    status.write(paths, words())
    with pytest.raises(
        NodeError, match=r"^another agent \(pid 1\) already serves /sys/fs/bpf/here"
    ):
        status.lock(paths)


def test_asked_meanwhile(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks whether an agent lives just as one starts keeps it from nothing."""
    paths.run.mkdir(parents=True, exist_ok=True)
    with paths.lock_file.open("w") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr("ebpflb.serve.status.time.sleep", lambda _: asking.close())
        status.lock(paths).close()


def test_asking_does_not_lock(paths: Paths, held: IO[str]) -> None:
    """Looking whether an agent lives never keeps one away."""
    held.close()
    status.alive(paths)
    status.lock(paths).close()


def test_states_are_apart(paths: Paths, held: IO[str]) -> None:
    """Another state directory has another agent, other words and another lock."""
    other = Paths(state=Path("/sys/fs/bpf/there"), run=paths.run)
    status.write(paths, words())
    assert not status.alive(other)
    assert status.read(other) is None
    status.lock(other).close()


def test_no_folder_to_be_had(tmp_path: Path) -> None:
    """A run directory that cannot be made is named in one line."""
    (tmp_path / "file").touch()
    with pytest.raises(NodeError, match="file/run"):
        status.lock(Paths(state=Path("/s"), run=tmp_path / "file" / "run"))


def test_forget(paths: Paths, held: IO[str]) -> None:
    """Nothing is left, not even the folder; and to forget twice is no error."""
    status.write(paths, words())
    status.forget(paths)
    status.forget(paths)
    assert not paths.run.exists()


def test_renew(caplog: pytest.LogCaptureFixture) -> None:
    """A reason is logged when it is new, and not again as long as it stays the same."""
    said: dict[str, str] = {}
    for now in ({"a": "full"}, {"a": "full", "b": "gone"}, {"a": "late"}, {}, {"a": "late"}):
        said = status.renew(said, now, "%s: %s")
        assert said == now
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["a: full", "b: gone", "a: late", "a: late"]
