# SPDX-License-Identifier: Apache-2.0
"""The agent's status: a small JSON file, which can be read while the agent runs and afterwards.

The lock file beside it is held as long as the agent runs: it tells whether one runs, and keeps a
second agent away from the same maps.
"""

import glob
import logging
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import IO, Any

import msgspec

from ebpflb import files
from ebpflb.errors import NodeError, in_words
from ebpflb.files import decode_regular
from ebpflb.model import annotations
from ebpflb.model.packet_path import PacketPath
from ebpflb.model.services import (
    parse_external_ips,
    parse_namespaces,
    parse_requirements,
    show_namespaces,
    show_requirements,
)
from ebpflb.options import ALL_SOCKETS, REPAIR, ConntrackOptions, Options, Paths
from ebpflb.plan.removed_endpoints import WatchedPort
from ebpflb.redaction import redact

# Where an agent has the cluster's objects from, for others who want to list them as it does, and
# what becomes of what they find.


class Origin(msgspec.Struct, frozen=True):
    """The options that decide which services an agent plans, and how netfilter translates. No
    secret is among them.
    """

    node_name: str
    cgroup: str
    manifests: str = ""
    kubeconfig: str = ""
    master: str = ""
    bind_address: str = ""
    serve_external_ips: bool = True
    external_ips: str = "all"
    nodeport_source_ranges: tuple[str, ...] = ()
    namespaces: str = ""
    services: str = ""
    scheduler: str = annotations.RANDOM
    namespace_share: float = Options.namespace_share
    masquerade_mark: int = Options.masquerade_mark
    masquerade_ports: tuple[int, int] = Options.masquerade_ports
    be_liberal: bool = False  # with segments that conntrack finds invalid
    audit: str = REPAIR  # one of options.AUDITS

    def options(self, paths: Paths) -> Options:
        """The same as Options of an agent. Raises ValueError for what is none, as a file may have
        it.
        """
        if self.scheduler not in annotations.SCHEDULERS:
            raise ValueError(f"{self.scheduler} is no scheduler")
        if not 0 < self.namespace_share <= 1:
            raise ValueError(f"{self.namespace_share} is no share")
        if not 0 < self.masquerade_mark < 1 << 32:
            raise ValueError(f"{self.masquerade_mark} is no mark")
        if not 0 < self.masquerade_ports[0] <= self.masquerade_ports[1] < 1 << 16:
            raise ValueError(f"{self.masquerade_ports} are no ports")
        return Options(
            paths=paths,
            node_name=self.node_name,
            cgroup=_path(self.cgroup),
            manifests=_path(self.manifests) if self.manifests else None,
            kubeconfig=_path(self.kubeconfig) if self.kubeconfig else None,
            master=self.master,
            bind_address=ip_address(self.bind_address) if self.bind_address else None,
            serve_external_ips=self.serve_external_ips,
            external_ips=parse_external_ips(self.external_ips),
            nodeport_source_ranges=tuple(map(ip_network, self.nodeport_source_ranges)),
            namespaces=parse_namespaces(self.namespaces),
            services=parse_requirements(self.services),
            scheduler=self.scheduler,
            namespace_share=self.namespace_share,
            masquerade_mark=self.masquerade_mark,
            masquerade_ports=self.masquerade_ports,
            conntrack=ConntrackOptions(be_liberal=self.be_liberal),
        )


def _path(text: str) -> Path:
    if "\0" in text:
        raise ValueError("a path with a null character")
    return Path(text)


def make_origin(options: Options) -> Origin:
    """Of an agent's options."""
    return Origin(
        node_name=options.node_name,
        cgroup=str(options.cgroup),
        manifests=str(options.manifests or ""),
        kubeconfig=str(options.kubeconfig or ""),
        master=options.master,
        bind_address=str(options.bind_address or ""),
        serve_external_ips=options.serve_external_ips,
        external_ips=str(options.external_ips),
        nodeport_source_ranges=tuple(map(str, options.nodeport_source_ranges)),
        namespaces=show_namespaces(options.namespaces),
        services=show_requirements(options.services),
        scheduler=options.scheduler,
        namespace_share=options.namespace_share,
        masquerade_mark=options.masquerade_mark,
        masquerade_ports=options.masquerade_ports,
        be_liberal=options.conntrack_wanted.be_liberal,
        audit=options.audit,
    )


log = logging.getLogger(__name__)

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_OWN_FILES = {".json", ".lock", ".ports", ".sock", ".history", ".bad", ".sysctls", ".tmp", ".half"}
_LARGEST = 64 << 20  # bytes; 100,000 Services with on-removal have 15 MB
_LOST = "`ebpflb monitor` and `doctor` find this agent again when it is restarted"
CURRENT_PROGRAMS = "current"  # the loaded programs are those of this agent's version


class AgentStatus(msgspec.Struct, frozen=True):
    """What `ebpflb status` shows of the agent; the agent makes a new one when any of it changes.

    All but the first four fields have defaults, so that the file of another version can be read.
    """

    pid: int
    node: str
    source: str
    started: str
    programs: str = CURRENT_PROGRAMS  # or that old ones serve, and why
    packet_path: PacketPath | None = None  # which engine opens flows of packets, and why
    socket_translation: str = ALL_SOCKETS  # one of options.SOCKET_TRANSLATIONS
    fast_forward: bool = False  # established flows of the flow tables do not pass the stack
    flowtable: str | None = None  # what --fast-forward does with netfilter
    left_to_kube_proxy: str = ""  # which Services a kube-proxy beside has to serve
    lists_complete: bool = False  # Services, EndpointSlices and the Node have been received
    last_received: Mapping[str, str] = {}  # kind -> when the source last sent anything of it
    service_ports: int = 0
    backends: int = 0
    node_unknown: str | None = None  # where no Node has this node's name
    source_errors: Mapping[str, str] = {}  # source -> what is wrong with it
    invalid_objects: Mapping[str, str] = {}  # object -> what is wrong with it
    object_warnings: Mapping[str, str] = {}  # object -> what of it is not served, and why
    contested: Mapping[str, str] = {}  # frontend -> which Service has it, and which has not
    not_programmed: Mapping[str, str] = {}  # Service -> why a port of it does not fit
    reset_on_removal: tuple[WatchedPort, ...] = ()  # whose connections the agent may have to reset
    devices_not_served: Mapping[str, str] = {}  # device -> why its packets are not served
    sync_error: str | None = None  # of the last sync, if it failed
    stale_udp_error: str | None = None  # why stale UDP sockets cannot be ended at present
    kube_proxy: str | None = None  # what one does on this node, or has left there
    kube_proxy_runs: bool = False  # on this node; it may have ports that are the agent's
    ports_not_open: Mapping[str, str] = {}  # server of the agent -> why it cannot listen
    ports_not_reserved: str | None = None  # why others may take the ports used for masquerading
    attached: bool = False  # programs are in force; whose, says ``programs``
    monitor: str | None = None  # that one runs
    in_sync: bool = False  # the last sync wrote everything
    drift: Mapping[str, str] = {}  # what differs from what is planned -> in which way
    origin: Origin | None = None  # where it has the cluster's objects from
    audit_errors: Mapping[str, str] = {}  # what is compared -> why it cannot be, or not put back

    def __post_init__(self) -> None:
        """Raises ValueError for times that are none, as a file may have them."""
        for text in (self.started, *self.last_received.values()):
            if datetime.fromisoformat(text).tzinfo is None:
                raise ValueError(f"{text} is without its offset to UTC")

    def changed(self, **fields: Any) -> "AgentStatus":
        """The same with other values in these fields."""
        return msgspec.structs.replace(self, **fields)


def initial(*, node: str, source: str) -> AgentStatus:
    """The status of a new agent in this process."""
    now = rfc3339(time.time())
    return AgentStatus(pid=os.getpid(), node=node, source=source, started=now)


def rfc3339(seconds: float) -> str:
    """A time since the epoch, to the second."""
    return _in_words(int(seconds))


@lru_cache(maxsize=16)
def _in_words(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


class StatusFile:
    """Where an agent publishes its status."""

    def __init__(self, paths: Paths) -> None:
        self._path = paths.status_file
        self._content = b""
        self._error = ""

    def write(self, status: AgentStatus) -> bool:
        """Replaces the file in one step, unless this is its content already.

        Where the directory cannot be written there is no status, and the agent goes on without:
        then it is False, and said once.
        """
        content = redact(msgspec.json.encode(status).decode()).encode()
        try:
            if content != self._content:
                self._replace(content)
        except OSError as error:
            self._fail(in_words(error))
            content = b""
        else:
            self._error = ""
        self._content = content
        return bool(content)

    def _replace(self, content: bytes) -> None:
        """The run directory may have been removed under the agent."""
        folder = self._path.parent
        if not folder.is_dir():
            folder.mkdir(parents=True, mode=_PRIVATE_FOLDER)
            log.warning("%s was removed, and is made again: %s", folder, _LOST)
        files.replace(self._path, content)

    def _fail(self, reason: str) -> None:
        if reason != self._error:
            log.warning("%s: `ebpflb status` shows what was written before", reason)
        self._error = reason


def read(paths: Paths) -> AgentStatus | None:
    """The last published status; None where no agent has ever run, or what is there is none."""
    return decode_regular(paths.status_file, AgentStatus, _LARGEST)


def lock(paths: Paths) -> IO[bytes]:
    """The open lock file, to be held while the agent runs. Raises NodeError if another one runs."""
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
    """The error for a second agent; ``running`` are the paths of the one that runs."""
    status = read(running)
    who = f"pid {status.pid}" if status else "an unknown pid"
    return NodeError(f"another agent ({who}) already serves {running.state}")


def is_running(paths: Paths) -> bool:
    """Whether an agent holds the lock file now; ``agent_lock`` asks for both locks."""
    return files.is_locked(paths.lock_file)


def _make_private(folder: Path) -> None:
    """Makes the run directory for this user alone. One that holds files of others is left as it is,
    unless everybody may write it. Raises NodeError or OSError.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH:
        raise NodeError(f"{folder}: everybody may write it: choose another --run-dir")
    own = all(path.suffix in _OWN_FILES for path in folder.iterdir())
    if own and found.st_uid == os.geteuid() and found.st_mode & 0o077:
        folder.chmod(_PRIVATE_FOLDER)


def remove(paths: Paths) -> None:
    """Removes all files of an agent that runs no more; a directory in place of one stays."""
    sockets = (paths.socket_file, paths.monitor_socket)
    files = (paths.status_file, paths.lock_file, paths.ports_file, *sockets)
    recorded = paths.run.glob(f"{glob.escape(paths.name)}.*history*")
    for path in (*files, *(path for path in recorded if path.is_symlink() or not path.is_dir())):
        path.unlink(missing_ok=True)
    if paths.run.is_dir() and not any(paths.run.iterdir()):
        with suppress(OSError):  # a mount point, or on a read-only root, as in a container
            paths.run.rmdir()


def log_new(before: Mapping[str, str], now: Mapping[str, str], line: str) -> None:
    """Logs each reason that was not there before; ``line`` takes a name and its reason."""
    for name, reason in now.items():
        if before.get(name) != reason:
            log.error(line, name, reason)
