# SPDX-License-Identifier: Apache-2.0
"""The agent's status: a small JSON file, readable while the agent runs and afterwards.

The lock file beside it is held as long as the agent runs: it shows whether one runs, and keeps a
second agent away from the same maps.
"""

import glob
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from ebpflb import files
from ebpflb.errors import NodeError, in_words, instead_of_os_error, log_once
from ebpflb.files import decode_regular
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.maps.state_dir import StateLock
from ebpflb.model.events import Drift, Part
from ebpflb.model.packet_path import PacketPath
from ebpflb.options import ALL_SOCKETS, Paths
from ebpflb.redaction import redact
from ebpflb.version import VERSION

log = logging.getLogger(__name__)

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_FORMER_FILE = ".contents"  # of a version that left the maps' content to the next agent
_OWN_FILES = {".json", ".lock", ".ports", ".sock", ".history", ".sysctls", ".failed", ".liberal"}
_OWN_FILES.add(_FORMER_FILE)
_LARGEST = 64 << 20  # bytes
_LOST = "`ebpflb monitor` and `doctor` cannot reach this agent until it is restarted"
CURRENT_PROGRAMS = "current"  # the loaded programs are those of this agent's version
FORMER_PROGRAMS = "an earlier version's, because this version's cannot be loaded"


class AgentStatus(msgspec.Struct, frozen=True):
    """The agent's part of `ebpflb status`; each change makes a new object.

    All but the first four fields have defaults, so that the file of another version can be read.
    """

    pid: int
    node: str
    source: str
    started: str
    version: str = ""  # of the agent; "" if it is older than this field
    programs: str = CURRENT_PROGRAMS  # or that old ones serve, and why
    packet_path: PacketPath | None = None  # which engine opens flows of packets, and why
    socket_translation: str = ALL_SOCKETS  # one of options.SOCKET_TRANSLATIONS
    flowtable: str | None = None  # the state of --fast-forward
    conntrack_liberal: str | None = None  # the state of --conntrack-tcp-be-liberal=auto
    removed_settings: Mapping[str, str] = {}  # that a former version had -> what to do
    left_to_kube_proxy: str = ""  # which Services a kube-proxy on this node has to serve
    lists_complete: bool = False  # Services, EndpointSlices and the Node have been received
    last_received: Mapping[str, str] = {}  # kind -> when the source last sent anything about it
    service_ports: int = 0
    backends: int = 0
    failing_parts: Mapping[str, str] = {}  # part of the agent -> the unexpected exception
    node_unknown: str | None = None  # if no Node has this node's name
    source_errors: Mapping[str, str] = {}  # source -> its error
    invalid_objects: Mapping[str, str] = {}  # object -> its error
    object_warnings: Mapping[str, str] = {}  # object -> its unserved part, and why
    standalone: bool = False  # the objects come from manifests, which the operator writes
    claimed_twice: Mapping[str, str] = {}  # frontend -> which Service has it, and which have not
    not_programmed: Mapping[str, str] = {}  # Service -> why a port of it does not fit
    set_aside: Mapping[str, str] = {}  # service port -> endpoints that do not answer this node
    devices_not_served: Mapping[str, str] = {}  # device -> why its packets are not served
    choices_lost: Mapping[str, str] = {}  # device -> what becomes of its requests
    devices_to_come: int = 0  # to which the programs are being attached
    flows_wait: bool = False  # until then the flow tables, which are the engine, open no flow
    sync_error: str | None = None  # of the last sync, if it failed
    addresses: str = ""  # of --l2-pool: how many this cluster announces, and this node owns
    address_owners: Mapping[str, str] = {}  # load balancer address -> the node that answers for it
    address_nodes: list[str] = []  # living nodes that this one probes, and itself
    address_moves: int = 0  # times that this node has begun to answer for an address
    address_conflicts: Mapping[str, str] = {}  # address -> who else answers for it
    not_announced: str | None = None  # why this node may not answer for its addresses
    hand_over: str = ""  # to how many other nodes requests may be handed
    not_handed_to: Mapping[str, str] = {}  # node -> why nothing is handed to it
    not_handed_at: Mapping[str, str] = {}  # device -> why requests from there are not handed over
    hand_over_blocked: Mapping[str, str] = {}  # node or address -> why not, where somebody wants it
    addresses_missing: Mapping[str, str] = {}  # Service -> why it lacks a load balancer address
    node_not_written: str | None = None  # why the Node does not say whether Services work
    udp_not_ended: str | None = None  # why stale UDP sockets currently cannot be ended
    not_rebalanced: str | None = None  # why idle connections do not move, as Services want
    kube_proxy: str | None = None  # a kube-proxy on this node, or its leftovers
    kube_proxy_runs: bool = False  # on this node; it may have ports of the agent
    ports_not_open: Mapping[str, str] = {}  # server of the agent -> why it cannot listen
    ports_not_reserved: str | None = None  # why others may take the ports used for masquerading
    attached: bool = False  # programs are in force; ``programs`` says whose
    monitor: str | None = None  # the state of a running monitor
    in_sync: bool = False  # the last sync wrote everything
    drift: Mapping[str, str] = {}  # object -> how it differs from the plan
    objects_differ: Mapping[str, str] = {}  # object -> how the agent's copy differs, by doctor
    audit_errors: Mapping[str, str] = {}  # check -> why it cannot compare or correct

    def __post_init__(self) -> None:
        """Raises ValueError for invalid times, as a file may have."""
        for text in (self.started, *self.last_received.values()):
            if datetime.fromisoformat(text).tzinfo is None:
                raise ValueError(f"{text} has no UTC offset")

    def changed(self, **fields: Any) -> "AgentStatus":
        """Return the status with other values in these fields."""
        return msgspec.structs.replace(self, **fields)


def initial(*, node: str, source: str) -> AgentStatus:
    """Return the status of a new agent in this process."""
    now = rfc3339(time.time())
    return AgentStatus(os.getpid(), node, source, now, VERSION)


def rfc3339(seconds: float) -> str:
    """Format a time since the epoch, to the second."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


class StatusFile:
    """The file in which an agent publishes its status."""

    def __init__(self, paths: Paths) -> None:
        self._path = paths.status_file
        self._content = b""
        self._error = ""

    def write(self, status: AgentStatus) -> bool:
        """Replace the file in one step, unless it already has this content.

        Return whether it is written.

        If the directory cannot be written there is no status, and the agent continues without; this
        is logged once.
        """
        content = redact(msgspec.json.encode(status).decode()).encode()
        try:
            if content != self._content:
                self._replace(content)
        except OSError as error:
            line = "the status cannot be written (%s); `ebpflb status` shows an older state"
            self._error = log_once(log.warning, line, in_words(error), self._error)
            content = b""
        else:
            self._error = ""
        self._content = content
        return bool(content)

    def _replace(self, content: bytes) -> None:
        """Replace the file; the run directory may have been removed meanwhile."""
        folder = self._path.parent
        if not folder.is_dir():
            folder.mkdir(parents=True, mode=_PRIVATE_FOLDER)
            log.warning("%s was removed and is created again: %s", folder, _LOST)
        files.replace(self._path, content)


def read(paths: Paths) -> AgentStatus | None:
    """Return the last published status; None if no agent has ever run, or the file is invalid."""
    return decode_regular(paths.status_file, AgentStatus, _LARGEST)


def lock(paths: Paths) -> IO[bytes]:
    """Return the open lock file, held while the agent runs.

    Raises NodeError if another one runs.
    """
    try:
        _make_private(paths.run)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        opened = os.open(paths.lock_file, flags, _PRIVATE_FILE)
        file = open(opened, "r+b", buffering=0)  # noqa: SIM115
        os.fchmod(opened, _PRIVATE_FILE)
    except OSError as error:
        raise NodeError(f"{error.filename or paths.lock_file}: {error.strerror}") from error
    if not files.lock(file.fileno()):
        file.close()
        raise second_agent(paths)
    return file


def second_agent(running: Paths) -> NodeError:
    """Return the error for a second agent; ``running`` are the paths of the running one."""
    status = read(running)
    who = f"pid {status.pid}" if status else "an unknown pid"
    return NodeError(f"another agent ({who}) already serves {running.state}")


def _make_private(folder: Path) -> None:
    """Create the run directory for this user only. Raises NodeError or OSError.

    A directory with files of other programs is left unchanged, but refused if everyone may write
    it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH:
        raise NodeError(f"{folder}: everyone may write to it: choose another --run-dir")
    own = all(path.suffix in _OWN_FILES for path in folder.iterdir())
    if own and found.st_uid == os.geteuid() and found.st_mode & 0o077:
        folder.chmod(_PRIVATE_FOLDER)


def files_of(paths: Paths) -> list[Path]:
    """Return the files of an agent, which need not exist; a directory in place of one is none."""
    sockets = (paths.socket_file, paths.monitor_socket)
    former = paths.run / f"{paths.name}{_FORMER_FILE}"
    kept = (paths.ports_file, paths.liberal_file, paths.failure_file, former)
    recorded = paths.run.glob(f"{glob.escape(paths.name)}.*history*")
    files = (path for path in recorded if path.is_symlink() or not path.is_dir())
    return [paths.status_file, paths.lock_file, *kept, *sockets, *files]


def remove(paths: Paths) -> None:
    """Remove all files of an agent that no longer runs."""
    for path in files_of(paths):
        path.unlink(missing_ok=True)
    if paths.run.is_dir() and not any(paths.run.iterdir()):
        with suppress(OSError):  # a mount point, or on a read-only root, as in a container
            paths.run.rmdir()


def log_new(before: Mapping[str, str], now: Mapping[str, str], line: str) -> None:
    """Log each new reason; ``line`` takes a name and its reason."""
    for name, reason in now.items():
        if before.get(name) != reason:
            log.error(line, name, reason)


# Whether an agent serves a state directory, and the lock that keeps a second agent away.
#
# There are two locks, of the state directory and of a file in the run directory. The first one
# decides; the second one survives a remount of the bpffs, and is known to earlier versions.


class AgentLock:
    """The lock of the state directory, and the record in it.

    Both are gone if another bpffs is mounted there, while the agent continues to run.
    """

    def __init__(self, paths: Paths, state: StateLock) -> None:
        self._paths, self._state = paths, state

    def faults(self) -> Iterator[Drift]:
        """Yield which of the two is missing."""
        if not self._state.holds():
            yield Drift(Part.PIN, f"lock of {self._paths.state}", "is not held any more")
        elif not state_dir.is_record_of(self._paths):
            yield Drift(Part.PIN, f"{self._paths.state}/{state_dir.RECORD}", "is missing")

    def restore(self) -> bool:
        """Restore both; return False if another agent has taken the lock meanwhile.

        Raises NodeError if there is no bpffs.
        """
        if not self._state.holds():
            self._state.release()
            if not self._state.take():
                return False
        _record(self._paths)
        return True


@contextmanager
def held(paths: Paths) -> Iterator[AgentLock]:
    """Hold the lock while the agent runs, and record the run directory.

    Raises NodeError if another agent runs, with its pid if that is known.
    """
    state = StateLock(paths.state)
    with lock(paths):
        if not state.take():
            raise second_agent(state_dir.read_record(paths.state) or paths)
        try:
            _record(paths)
            yield AgentLock(paths, state)
        finally:
            _remove_if_empty(paths)
            state.release()


def is_running(paths: Paths) -> bool:
    """Whether an agent holds either lock now."""
    return files.is_locked(paths.state) or files.is_locked(paths.lock_file)


def _record(paths: Paths) -> None:
    """Record the run directory.

    An agent with another run directory has ended: its additions to the kernel's list of reserved
    ports now belong to this agent.
    """
    former = state_dir.read_record(paths.state)
    if former is not None and former.run != paths.run:
        with suppress(OSError, files.UnusableFile):
            if not paths.ports_file.exists():
                files.replace(paths.ports_file, files.read_regular(former.ports_file))
        remove(former)
    with instead_of_os_error(str(paths.state)):
        state_dir.write_record(paths)


def _remove_if_empty(paths: Paths) -> None:
    """Remove a state directory that was created only for the lock: the agent did not even begin."""
    with suppress(OSError):
        if os.listdir(paths.state) == [state_dir.RECORD]:
            (paths.state / state_dir.RECORD).unlink()
            paths.state.rmdir()
