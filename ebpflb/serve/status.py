# SPDX-License-Identifier: Apache-2.0
"""The agent's words about itself: a small JSON file, readable while it runs and after its death.

A lock beside it, held as long as the agent lives, tells the two apart, and keeps a second agent
away from the same maps.
"""

import fcntl
import logging
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec

from ebpflb.errors import NodeError
from ebpflb.options import Paths

log = logging.getLogger(__name__)


class AgentStatus(msgspec.Struct):
    """What `ebpflb status` shows of the agent."""

    pid: int
    node: str
    source: str
    started: str
    programs: str = "current"  # or which old ones serve, and why
    complete: bool = False  # every list has been received
    service_ports: int = 0
    backends: int = 0
    troubles: dict[str, str] = {}  # source -> what is wrong with it
    refused: dict[str, str] = {}  # object -> why its last good state stays
    unplaced: dict[str, str] = {}  # service -> which map is full
    unattached: dict[str, str] = {}  # device -> why its packets are not served
    failed: str | None = None  # the last write, if it failed
    kube_proxy: str | None = None  # what one does here, or left
    unreserved: str | None = None  # why others may take the ports that we masquerade with


def now() -> str:
    """The time of day, RFC 3339."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(paths: Paths, words: AgentStatus, said: bytes = b"") -> bytes:
    """Replaces the file in one step, unless it says that already; gives what has been ``said``.

    A folder that cannot be written costs only the status.
    """
    now = msgspec.json.encode(words)
    half = paths.status_file.with_suffix(".half")
    try:
        if now != said:
            half.write_bytes(now)
            half.replace(paths.status_file)
    except OSError:
        return b""
    return now


def read(paths: Paths) -> AgentStatus | None:
    """The last words, or None where no agent has ever run."""
    try:
        return msgspec.json.decode(paths.status_file.read_bytes(), type=AgentStatus)
    except (OSError, msgspec.MsgspecError):
        return None


def lock(paths: Paths) -> IO[str]:
    """Held while the agent lives. Raises NodeError if another one does."""
    try:
        paths.run.mkdir(parents=True, exist_ok=True)
        held = paths.lock_file.open("a+")
    except OSError as error:
        raise NodeError(f"{paths.run}: {error.strerror}") from error
    if not _taken(held):
        words = read(paths)
        who = f"pid {words.pid}" if words else "an unknown pid"
        raise NodeError(f"another agent ({who}) already serves {paths.state}")
    return held


def _taken(held: IO[str]) -> bool:
    """Tried for a fifth of a second: who asks whether an agent lives has the lock for a moment."""
    for _ in range(20):
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def alive(paths: Paths) -> bool:
    """Whether an agent holds the lock now."""
    try:
        with paths.lock_file.open() as probe:
            fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def forget(paths: Paths) -> None:
    """Removes all files."""
    for path in (paths.status_file, paths.lock_file, paths.ports_file):
        path.unlink(missing_ok=True)
    if paths.run.is_dir() and not any(paths.run.iterdir()):
        Path(paths.run).rmdir()


def renew(said: dict[str, str], now: dict[str, str], line: str) -> dict[str, str]:
    """What is to be said from now on; what was not said before is logged, as ``line`` has it."""
    for name, reason in now.items():
        if said.get(name) != reason:
            log.error(line, name, reason)
    return now


def introduce(*, node: str, source: str) -> AgentStatus:
    """The first words of a new agent."""
    return AgentStatus(pid=os.getpid(), node=node, source=source, started=now())
