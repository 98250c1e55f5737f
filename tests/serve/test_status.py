# SPDX-License-Identifier: Apache-2.0
"""The agent's status file, and the lock that shows whether it runs."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from ebpflb.errors import NodeError
from ebpflb.options import Paths
from ebpflb.serve import status

PORT = ["default", "web", "http", 6]
STARTED = "2026-11-23T12:00:00+00:00"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(state=Path("/sys/fs/bpf/here"), run=tmp_path / "run" / "deeper")


@pytest.fixture
def held(paths: Paths) -> Iterator[IO[bytes]]:
    """Hold the lock of a running agent."""
    with status.lock(paths) as lock:
        yield lock


def some(**more: object) -> status.AgentStatus:
    return status.AgentStatus(pid=1, node="n", source="s", started=STARTED, **more)  # type: ignore[arg-type]


def publish_in(paths: Paths) -> None:
    """Return a publisher for this directory."""
    paths.run.mkdir(parents=True)
    publish(paths)


def publish(paths: Paths, **more: object) -> None:
    """Return the publisher of an agent without an earlier status."""
    status.StatusFile(paths).write(some(**more))


def test_the_file_reads_back_as_written(paths: Paths, held: IO[str]) -> None:
    """The file reads back as written, including errors."""
    errors = {"source_errors": {"api": "gone"}, "not_programmed": {"a/b": "full"}}
    publish(paths, **errors, sync_error="no", lists_complete=True)
    assert status.read(paths) == some(**errors, sync_error="no", lists_complete=True)


def test_other_version(paths: Paths, held: IO[str]) -> None:
    """The known fields in another version's file are read."""
    known = f'{{"pid": 1, "node": "n", "source": "s", "started": "{STARTED}", "backends": 2'
    text = f'{known}, "complete": true}}'
    paths.status_file.write_text(text)
    assert status.read(paths) == some(backends=2)


def test_equal_status_is_not_written(paths: Paths, held: IO[str]) -> None:
    """An unchanged status is not written; a failed write is tried again."""
    file = status.StatusFile(paths)
    file.write(some())
    paths.status_file.unlink()
    file.write(some())
    assert status.read(paths) is None
    paths.status_file.mkdir()
    file.write(some(backends=1))
    paths.status_file.rmdir()
    file.write(some(backends=1))
    assert status.read(paths) == some(backends=1)


HOSTILE_FIELDS: dict[str, object] = {
    "started": "long ago",
    "last_received": {"Service": "2026-11-23T12:00:00"},
    "drift": {"a": 1},
}


@pytest.mark.parametrize("field", HOSTILE_FIELDS)
def test_wrong_fields(paths: Paths, caplog: pytest.LogCaptureFixture, field: str) -> None:
    """A status with one invalid value counts as missing, and is named in one line."""
    publish_in(paths)
    known = json.loads(paths.status_file.read_text())
    paths.status_file.write_text(json.dumps(known | {field: HOSTILE_FIELDS[field]}))
    assert status.read(paths) is None
    (said,) = caplog.messages
    assert said.startswith(f"{paths.status_file}: ignored: ") and "\n" not in said


def test_an_unwritable_directory_is_logged_once(
    paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    """If the directory cannot be made there is no status, and nothing else happens; this is logged
    once.
    """
    paths.run.parent.touch()
    file = status.StatusFile(paths)
    assert not (file.write(some()) or file.write(some(backends=1)))
    assert status.read(paths) is None
    (line,) = [it for it in caplog.messages if "shows an older state" in it]
    assert "Errno" not in line


def test_a_run_directory_that_is_removed(
    paths: Paths, held: IO[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The directory is made again, for this user only; what is lost until the restart is logged
    once.
    """
    file = status.StatusFile(paths)
    file.write(some())
    shutil.rmtree(paths.run)
    assert file.write(some(backends=1)) and file.write(some(backends=2))
    assert status.read(paths) == some(backends=2)
    assert paths.run.stat().st_mode & 0o777 == 0o700
    (line,) = caplog.messages
    assert line.startswith(f"{paths.run} was removed and is created again: ")


def test_an_agent_runs_while_it_holds_its_lock(paths: Paths, held: IO[str]) -> None:
    """An agent runs while it holds its lock; its status stays after its end."""
    publish(paths)
    assert status.is_running(paths)
    held.close()
    assert not status.is_running(paths)
    assert status.read(paths) == some()


def test_second_agent(paths: Paths, held: IO[str]) -> None:
    """The error for a second agent says which agent serves which directory."""
    publish(paths)
    with pytest.raises(
        NodeError, match=r"^another agent \(pid 1\) already serves /sys/fs/bpf/here"
    ):
        status.lock(paths)


def test_lock_is_held_for_a_moment(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that tests whether an agent runs does not keep an agent from starting."""
    paths.run.mkdir(parents=True, exist_ok=True)
    with paths.lock_file.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        monkeypatch.setattr("ebpflb.serve.status.time.sleep", lambda _: other.close())
        status.lock(paths).close()


def test_no_run_directory(tmp_path: Path) -> None:
    """A run directory that cannot be made is named in one line."""
    (tmp_path / "file").touch()
    with pytest.raises(NodeError, match="file/run"):
        status.lock(Paths(state=Path("/s"), run=tmp_path / "file" / "run"))


def test_log_new(caplog: pytest.LogCaptureFixture) -> None:
    """A new reason is logged, and not repeated while it stays the same."""
    before: dict[str, str] = {}
    for now in ({"a": "full"}, {"a": "full", "b": "gone"}, {"a": "late"}, {}, {"a": "late"}):
        status.log_new(before, now, "%s: %s")
        before = now
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["a: full", "b: gone", "a: late", "a: late"]
