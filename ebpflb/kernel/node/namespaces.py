# SPDX-License-Identifier: Apache-2.0
"""The network namespaces of this node, the clients in them, and this process.

A function is called in each of the namespaces.

They are found by the names that container runtimes give them and by the processes inside them; a
namespace with neither is not found. Entering a namespace takes CAP_SYS_ADMIN, and finding it by
another user's process CAP_SYS_PTRACE too.
"""

import ctypes
import errno
import logging
import os
import posixpath
import resource
import socket
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import Any, TypeVar

from ebpflb.errors import NodeError, NotFound
from ebpflb.kernel import bpf, netlink
from ebpflb.kernel.node.device_watch import list_devices
from ebpflb.model.addresses import Address

log = logging.getLogger(__name__)

PROCESSES = Path("/proc")
OWN_NETNS = Path("/proc/thread-self/ns/net")
NAMED = tuple(map(Path, ("/run/netns", "/var/run/netns", "/run/docker/netns")))
HOST_NAME = 0x04000000  # CLONE_NEWUTS
_GET_ID = 90  # RTM_GETNSID
_ID, _DESCRIPTOR = 1, 3  # NETNSA_NSID, NETNSA_FD
_GENERIC = bytes(4)  # struct rtgenmsg, padded
_NUMBER = Struct("=i")
_NOT_LINKED = _NUMBER.pack(-1)  # NETNSA_NSID_NOT_ASSIGNED

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
SO_NETNS_COOKIE = 71
_libc = ctypes.CDLL(None, use_errno=True)  # for calls that Python 3.11 does not have

_Identity = tuple[int, int]
_T = TypeVar("_T")


def unshare(kind: int) -> None:
    """unshare(2): move this thread into a new namespace of this kind. Raises OSError."""
    _check(_libc.unshare(kind))


def _setns(namespace: int, kind: int) -> None:
    """setns(2): move this thread into the namespace, which is an open file. Raises OSError."""
    _check(_libc.setns(namespace, kind))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def own_cookie() -> int | None:
    """Return the cookie of the thread's namespace; None if the kernel does not have it (5.14)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            packed = any_socket.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        except OSError:
            return None
    return int.from_bytes(packed, "little")


class Namespaces:
    """All namespaces that can be found; warns once if they may not be entered.

    The cookie of a namespace is remembered when it is entered, so that later only those are entered
    in which a caller looks for something.
    """

    def __init__(self) -> None:
        self._warned = False
        self._cookies: dict[_Identity, int | None] = {}

    def each(
        self, function: Callable[[], _T], cookies: Collection[int] | None = None
    ) -> Iterator[_T]:
        """Call ``function`` in each namespace, in our own first; yield the results.

        With ``cookies`` only in the namespaces that have them: first those known to, then unknown
        ones, then others until every cookie is found; in all before Linux 5.14, which has no
        cookies. Namespaces that cannot be entered, because they were deleted or it is forbidden,
        are skipped.
        """
        left: set[int | None] | None = None if cookies is None else {*cookies}
        yield from self._visit(function, left)
        for path in self._others(left):
            try:
                found = call_in(path, partial(self._visit, function, left))
            except OSError as error:
                self._warn(error)
            else:
                yield from found

    def _visit(self, function: Callable[[], _T], left: set[int | None] | None) -> list[_T]:
        """Call the function if this thread's namespace is wanted; take its cookie from ``left``."""
        cookie, place = own_cookie(), identity(OWN_NETNS)
        if place:
            self._cookies[place] = cookie
        if left is None or cookie is None:
            return [function()]
        is_wanted = cookie in left
        left.discard(cookie)
        return [function()] if is_wanted else []

    def _others(self, left: set[int | None] | None) -> Iterator[Path]:
        """Yield the others until none is wanted: with a wanted cookie, unknown ones, the rest."""
        if left is not None and not left:
            return
        places = {place: path for path in others() if (place := identity(path))}
        self._cookies = {at: it for at, it in self._cookies.items() if at in places}

        def rank(place: _Identity) -> int:
            known = self._cookies.get(place)
            return 1 if known is None else 0 if known in (left or ()) else 2

        for place in sorted(places, key=rank):
            yield places[place]
            if left is not None and not left:
                return

    def _warn(self, error: OSError) -> None:
        if error.errno in (errno.EPERM, errno.EACCES) and not self._warned:
            self._warned = True
            log.warning(
                "pods' network namespaces cannot be entered: CAP_SYS_ADMIN is missing; sockets of "
                "pods are not ended (of removed endpoints, by on-removal, by rebalance)"
            )


def call_in(path: Path, function: Callable[[], _T], kind: int = NEW_NETWORK) -> _T:
    """Call the function in a new thread that enters the namespace; no other thread enters it.

    ``kind`` is the kind of namespace. Raises OSError if the namespace cannot be entered, or is of
    another kind.
    """

    return _in_thread(partial(enter, path, kind), function)


def call_in_new(function: Callable[[], _T]) -> _T:
    """Call the function in a thread with a network namespace that ends with the thread.

    Raises OSError.
    """

    def leave() -> None:
        try:
            unshare(NEW_NETWORK)
        except OSError as error:
            raise OSError(error.errno, f"cannot make a namespace: {error.strerror}") from error

    return _in_thread(leave, function)


def _in_thread(begin: Callable[[], None], function: Callable[[], _T]) -> _T:
    with ThreadPoolExecutor(1, "namespace") as thread:
        thread.submit(begin).result()
        return thread.submit(function).result()


def enter(path: Path, kind: int) -> None:
    """Move this thread into the namespace; its own needs no privilege. Raises OSError."""
    if identity(path) == identity(OWN_NETNS):
        return
    with _open(path) as namespace:
        try:
            _setns(namespace, kind)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def _open(path: Path) -> AbstractContextManager[int]:
    """Open a namespace; any other file opens at once too. Raises OSError."""
    return bpf.closing(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


def others() -> Iterator[Path]:
    """Yield one path for each namespace that can be found, except our own."""
    seen = {identity(OWN_NETNS)}
    for path in _paths():
        place = identity(path)
        if place and place not in seen:
            seen.add(place)
            yield path


def linked() -> Iterator[Path]:
    """Like ``others``, but only those that have a device with its other end in our own: pods.

    This holds with most CNIs; a pod that has only a device of its own (SR-IOV) is left out.
    """
    with netlink.route_socket() as kernel:
        for path in others():
            try:
                if _is_linked(kernel, path):
                    yield path
            except OSError:
                continue


def _is_linked(kernel: socket.socket, path: Path) -> bool:
    """Whether a device of ours leads to the namespace: the kernel numbers such namespaces."""
    with _open(path) as namespace:
        asked = _GENERIC + netlink.attribute(_DESCRIPTOR, _NUMBER.pack(namespace))
        answer = netlink.request(kernel, _GET_ID, asked)
    return netlink.attributes(answer, len(_GENERIC)).get(_ID, _NOT_LINKED) != _NOT_LINKED


def _paths() -> Iterator[Path]:
    """Yield names first: they last longer than processes, and reading them takes no capability."""
    for folder in NAMED:
        yield from sorted(folder.iterdir()) if folder.is_dir() else ()
    for process in processes():
        yield process / "ns/net"


def identity(path: Path) -> _Identity | None:
    """Return the identity of a namespace, however it is reached; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


# Clients on this machine: network namespaces by process, name, address and pod.
#
# Kubernetes gives the processes of a pod the pod's name as their host name, unless the pod is on
# the node's network. Only the kernel's host name (sethostname) is reliable: a process may have
# changed its environment.


_OWN_UTS, _OWN_USER = Path("/proc/thread-self/ns/uts"), Path("/proc/thread-self/ns/user")


def cookie(path: Path) -> int | None:
    """Return a namespace's cookie; None if the kernel has no option for it (5.14).

    Raises NodeError if the namespace is gone.
    """
    return _in(path, own_cookie)


def addresses(path: Path) -> tuple[Address, ...]:
    """Return the possible source addresses of a namespace's own packets. Raises NodeError."""
    return _in(path, own_addresses)


def own_addresses() -> tuple[Address, ...]:
    """Return the same for the namespace of this thread."""
    return tuple(it for device in list_devices().devices for it in device.sources)


def by_cookie(wanted: int) -> Path | None:
    """Return the namespace with this cookie; it may be our own."""
    return by_cookies().get(wanted)


def by_cookies() -> dict[int, Path]:
    """Return cookie -> path of all namespaces that can be found."""
    found = {path: _tried(path) for path in (OWN_NETNS, *others())}
    return {cookie: path for path, cookie in found.items() if cookie is not None}


def by_address(wanted: Address) -> Path | None:
    """Return the namespace with this address, except our own; those linked to ours come first.

    Namespaces of other networks on the machine may have the same addresses. Raises NodeError if one
    may not be entered, because the address may be there.
    """
    for path in chain(linked(), others()):
        with suppress(NotFound):
            if wanted in addresses(path):
                return path
    return None


def by_host_name(name: str) -> list[Path]:
    """Return the namespaces whose processes have this host name: those of pods with this name."""
    return list({place: path for place, path, its in host_names() if its == name}.values())


def host_names() -> Iterator[tuple[Any, Path, str]]:
    """Yield the identity of each other network namespace, its path in /proc and the host name of a
    process in it; once for processes with the same namespaces.
    """
    own = identity(OWN_NETNS)
    asked = set[Any]()  # a container's processes are alike: one running process is enough
    for process in processes():
        kinds = tuple(identity(process / "ns" / it) for it in ("net", "uts", "user"))
        place = kinds[0]
        if not place or place == own or kinds in asked:
            continue
        yield place, process / "ns/net", host_name(process)
        if identity(process / "ns/net") == place:
            asked.add(kinds)


def host_name(process: Path) -> str:
    """Return the host name that a container runtime gave a process; "" if it has the node's.

    A name does not count if the process could have set it itself, in a user namespace that it
    created.
    """
    if identity(process / "ns/uts") == identity(_OWN_UTS) or (
        identity(process / "ns/user") != identity(_OWN_USER)
    ):
        return ""
    with suppress(OSError):
        return call_in(process / "ns/uts", socket.gethostname, HOST_NAME)
    return ""


def processes() -> Iterator[Path]:
    """Yield the folders of all processes in /proc."""
    for entry in os.scandir(PROCESSES):
        if entry.name.isdigit():
            yield Path(entry.path)


def members(path: Path) -> Iterator[Path]:
    """Yield the folders in /proc of the processes in a namespace."""
    wanted = identity(path)
    return (it for it in processes() if identity(it / "ns/net") == wanted)


def in_cgroup(process: Path, root: Path) -> bool:
    """Whether a process is in this cgroup or below it, so that programs there see its sockets."""
    with suppress(OSError):
        for line in (process / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                inside = line.removeprefix("0::")
                return (root == Path("/") or Path(inside).is_relative_to(root)) and bool(inside)
    return False


def _tried(path: Path) -> int | None:
    try:
        return cookie(path)
    except NodeError:
        return None


def _in(path: Path, function: Callable[[], _T]) -> _T:
    try:
        return call_in(path, function)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFound(
            f"the network namespace {path} was removed: run the command again"
        ) from error
    except OSError as error:
        why = f"{error.strerror}: run as root, or grant CAP_SYS_ADMIN"
        raise NodeError(f"the network namespace {path} cannot be entered: {why}") from error


# This process: its capabilities, its clock, its OOM score and its file limit.
#
# bpf(2) and netlink need these capabilities (capabilities(7)):
#
#     CAP_BPF         maps, and loading programs (5.8)
#     CAP_NET_ADMIN   attaching to sockets and devices, network sysctls, ending sockets
#     CAP_PERFMON     the verifier lets a program compute with pointers, as ours do (5.8)
#
# The kernel accepts CAP_SYS_ADMIN for the first and the last. deploy/ grants only the capabilities
# listed here and in values.yaml; they may be granted to any user.


CAPABILITIES = {
    "CAP_NET_ADMIN": 12,
    "CAP_NET_RAW": 13,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}
NEEDED_CAPABILITIES = ("CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON")
OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")

_STATUS = Path("/proc/self/status")
_CLOCKS = Path("/proc/self/timens_offsets")  # missing if the kernel has no time namespaces
_PROCESSES = Path("/proc")
_MACHINES_PIDS = 0xEFFFFFFC  # PROC_PID_INIT_INO
_IMPLIED = {"CAP_BPF", "CAP_PERFMON"}  # by CAP_SYS_ADMIN


def capabilities(status: str | None = None) -> set[str]:
    """Return the effective capabilities among CAPABILITIES.

    ``status``: text of /proc/PID/status.
    """
    lines = (status or _STATUS.read_text()).splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    found = {name for name, number in CAPABILITIES.items() if mask >> number & 1}
    return found | _IMPLIED if "CAP_SYS_ADMIN" in found else found


def missing_capabilities(status: str | None = None) -> list[str]:
    """Return the needed capabilities that this process does not have."""
    held = capabilities(status)
    return [name for name in NEEDED_CAPABILITIES if name not in held]


def has_seccomp_filter() -> bool:
    """Whether a filter decides about this process's system calls (SECCOMP_MODE_FILTER)."""
    return "\nSeccomp:\t2\n" in _STATUS.read_text()


def clock_shift(clocks: Path = _CLOCKS) -> float:
    """Return the seconds by which CLOCK_MONOTONIC is ahead of the machine's.

    See time_namespaces(7).
    """
    lines = clocks.read_text().splitlines() if clocks.exists() else ()
    for name, seconds, nanoseconds in map(str.split, lines):
        if name == "monotonic":
            return int(seconds) + int(nanoseconds) / 1e9
    return 0.0


def sees_the_machine(processes: Path = _PROCESSES) -> bool:
    """Whether /proc shows the node's processes, and not only those of a container or pod.

    A node can be a container itself, such as kind's: its first process is outside this process's
    pod. The cgroups of a pod's containers have one parent.
    """
    own = processes / "self"
    if (own / "ns/pid").stat().st_ino == _MACHINES_PIDS:
        return True
    return _pod_cgroup(own) != _pod_cgroup(processes / "1")


def _pod_cgroup(process: Path) -> str:
    """Return the parent of the process's cgroup v2, as seen from this cgroup namespace."""
    lines = (process / "cgroup").read_text().splitlines()
    found = next((line[3:] for line in lines if line.startswith("0::")), "/")
    return posixpath.normpath(posixpath.join(found.lstrip("/"), ".."))


def adjust_oom_score(value: int, path: Path = OOM_SCORE_ADJ) -> None:
    """Set how early this process is killed when memory is short: from -1000, never, to 1000.

    If this is not allowed (a lower value needs CAP_SYS_RESOURCE) it is only logged, as in
    kube-proxy.
    """
    try:
        if int(path.read_text()) != value:
            path.write_text(f"{value}\n")
    except OSError as error:
        log.info("oom_score_adj: not set to %d: %s", value, error.strerror)


def raise_file_limit() -> None:
    """Allow as many open files as possible, as programs in Go do.

    Each health-check NodePort has a socket for each family, and the soft limit of systemd and
    containerd is 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.info("RLIMIT_NOFILE: left at %d: %s", soft, error)
