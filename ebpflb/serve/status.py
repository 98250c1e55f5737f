# SPDX-License-Identifier: Apache-2.0
"""The agent's status: a small JSON file, which can be read while the agent runs and afterwards.

The lock file beside it is held as long as the agent runs: it tells whether one runs, and keeps a
second agent away from the same maps.
"""

import fcntl
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from ebpflb.errors import NodeError
from ebpflb.model.packet_path import PacketPath
from ebpflb.options import ALL_SOCKETS, Paths

log = logging.getLogger(__name__)

CURRENT_PROGRAMS = "current"  # the loaded programs are those of this agent's version


class AgentStatus(msgspec.Struct, frozen=True):
    """What `ebpflb status` shows of the agent; the agent makes a new one in each turn of its loop.

    All but the first four fields have defaults, so that the file of another version can be read.
    """

    pid: int
    node: str
    source: str
    started: str
    programs: str = CURRENT_PROGRAMS  # or that old ones serve, and why
    packet_path: PacketPath | None = None  # which engine opens flows of packets, and why
    socket_translation: str = ALL_SOCKETS  # one of options.SOCKET_TRANSLATIONS
    lists_complete: bool = False  # Services, EndpointSlices and the Node have been received
    service_ports: int = 0
    backends: int = 0
    source_errors: Mapping[str, str] = {}  # source -> what is wrong with it
    invalid_objects: Mapping[str, str] = {}  # object -> why its last good state stays
    not_programmed: Mapping[str, str] = {}  # service port -> which map is full
    devices_not_served: Mapping[str, str] = {}  # device -> why its packets are not served
    sync_error: str | None = None  # of the last sync, if it failed
    kube_proxy: str | None = None  # what one does on this node, or has left there
    ports_not_reserved: str | None = None  # why others may take the ports used for masquerading

    def changed(self, **fields: Any) -> "AgentStatus":
        """The same with other values in these fields."""
        return msgspec.structs.replace(self, **fields)


def initial(*, node: str, source: str) -> AgentStatus:
    """The status of a new agent in this process."""
    now = datetime.now(UTC).isoformat(timespec="seconds")  # RFC 3339
    return AgentStatus(pid=os.getpid(), node=node, source=source, started=now)


class StatusFile:
    """Where an agent publishes its status."""

    def __init__(self, paths: Paths) -> None:
        self._path = paths.status_file
        self._content = b""

    def write(self, status: AgentStatus) -> None:
        """Replaces the file in one step, unless this is its content already.

        Where the directory cannot be written there is no status, and the agent goes on without.
        """
        content = msgspec.json.encode(status)
        temporary = self._path.with_suffix(".tmp")
        try:
            if content != self._content:
                temporary.write_bytes(content)
                temporary.replace(self._path)
        except OSError:
            self._content = b""
        else:
            self._content = content


def read(paths: Paths) -> AgentStatus | None:
    """The last published status, or None where no agent has ever run."""
    try:
        return msgspec.json.decode(paths.status_file.read_bytes(), type=AgentStatus)
    except (OSError, msgspec.MsgspecError):
        return None


def lock(paths: Paths) -> IO[str]:
    """The open lock file, to be held while the agent runs. Raises NodeError if another one runs."""
    try:
        paths.run.mkdir(parents=True, exist_ok=True)
        file = paths.lock_file.open("a+")
    except OSError as error:
        raise NodeError(f"{paths.run}: {error.strerror}") from error
    if not _lock(file):
        status = read(paths)
        who = f"pid {status.pid}" if status else "an unknown pid"
        raise NodeError(f"another agent ({who}) already serves {paths.state}")
    return file


def _lock(file: IO[str]) -> bool:
    """Tries for a fifth of a second, for ``is_running`` takes the lock for a moment."""
    for _ in range(20):
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def is_running(paths: Paths) -> bool:
    """Whether an agent holds the lock now."""
    try:
        with paths.lock_file.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def remove(paths: Paths) -> None:
    """Removes all files of an agent that runs no more."""
    for path in (paths.status_file, paths.lock_file, paths.ports_file):
        path.unlink(missing_ok=True)
    if paths.run.is_dir() and not any(paths.run.iterdir()):
        Path(paths.run).rmdir()


def log_new(before: Mapping[str, str], now: Mapping[str, str], line: str) -> None:
    """Logs each reason that was not there before; ``line`` takes a name and its reason."""
    for name, reason in now.items():
        if before.get(name) != reason:
            log.error(line, name, reason)
