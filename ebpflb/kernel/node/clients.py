# SPDX-License-Identifier: Apache-2.0
"""Clients on this machine: network namespaces by process, name, address and pod.

Kubernetes gives the processes of a pod the pod's name as their host name, unless the pod is on the
node's network. Only the kernel's host name (sethostname) is reliable: a process may have changed
its environment.
"""

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ebpflb.errors import NodeError, NotFound
from ebpflb.kernel import netlink
from ebpflb.kernel.attach.netns_cookie import by_socket
from ebpflb.kernel.node import namespaces
from ebpflb.model.addresses import Address

_OWN_UTS, _OWN_USER = Path("/proc/thread-self/ns/uts"), Path("/proc/thread-self/ns/user")
_RT_SCOPE_UNIVERSE = 0
_GET_ADDRESS = 22  # RTM_GETADDR
_ADDRESS_HEADER = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefix, flags, scope, index
_ADDRESS, _LOCAL = 1, 2  # IFA_ADDRESS, IFA_LOCAL: of a point-to-point device the own address

_T = TypeVar("_T")


def cookie(path: Path) -> int | None:
    """Return a namespace's cookie; None if the kernel has no option for it (5.14).

    Raises NodeError if the namespace is gone.
    """
    return _in(path, by_socket)


def addresses(path: Path) -> tuple[Address, ...]:
    """Return the possible source addresses of a namespace's own packets. Raises NodeError."""
    return _in(path, own_addresses)


def own_addresses() -> tuple[Address, ...]:
    """Return the same for the namespace of this thread."""
    found = []
    for message in netlink.dump(_GET_ADDRESS, bytes(_ADDRESS_HEADER.size)):
        _, _, _, scope, _ = _ADDRESS_HEADER.unpack_from(message)
        known = netlink.attributes(message, _ADDRESS_HEADER.size)
        if scope == _RT_SCOPE_UNIVERSE:
            found.append(ip_address(known.get(_LOCAL) or known[_ADDRESS]))
    return tuple(found)


def by_cookie(wanted: int) -> Path | None:
    """Return the namespace with this cookie; it may be our own."""
    return next((path for path in _all() if _tried(path) == wanted), None)


def by_cookies() -> dict[int, Path]:
    """Return cookie -> path of all namespaces that can be found."""
    found = {path: _tried(path) for path in _all()}
    return {cookie: path for path, cookie in found.items() if cookie is not None}


def by_address(wanted: Address) -> Path | None:
    """Return the namespace with this address, except our own; those linked to ours come first.

    Namespaces of other networks on the machine may have the same addresses. Raises NodeError if one
    may not be entered, because the address may be there.
    """
    for path in chain(namespaces.linked(), namespaces.others()):
        with suppress(NotFound):
            if wanted in addresses(path):
                return path
    return None


def by_name(name: str) -> Path | None:
    """Return a namespace by the name that ip(8) or a container runtime gave it, or by its path."""
    candidates = [Path(name)] if name.startswith("/") else [it / name for it in namespaces.NAMED]
    return next((path for path in candidates if namespaces.is_network(path)), None)


def by_host_name(name: str) -> list[Path]:
    """Return the namespaces whose processes have this host name: those of pods with this name."""
    return list({place: path for place, path, its in host_names() if its == name}.values())


def host_names() -> Iterator[tuple[Any, Path, str]]:
    """Yield the identity of each namespace but our own, its path by a process, and the host name of
    that process; once for each kind of process in the namespace.
    """
    own = namespaces.identity(namespaces.OWN_NETNS)
    asked = set[Any]()  # a container's processes are alike: one running process is enough
    for process in processes():
        kinds = tuple(namespaces.identity(process / "ns" / it) for it in ("net", "uts", "user"))
        place = kinds[0]
        if not place or place == own or kinds in asked:
            continue
        yield place, process / "ns/net", host_name(process)
        if namespaces.identity(process / "ns/net") == place:
            asked.add(kinds)


def host_name(process: Path) -> str:
    """Return the host name that a container runtime gave a process; "" if it has the node's.

    A name does not count if the process could have set it itself, in a user namespace that it
    created.
    """
    if namespaces.identity(process / "ns/uts") == namespaces.identity(_OWN_UTS) or (
        namespaces.identity(process / "ns/user") != namespaces.identity(_OWN_USER)
    ):
        return ""
    with suppress(OSError):
        return namespaces.call_in(process / "ns/uts", socket.gethostname, namespaces.HOST_NAME)
    return ""


def processes() -> Iterator[Path]:
    """Yield the folders of all processes in /proc."""
    for entry in os.scandir(namespaces.PROCESSES):
        if entry.name.isdigit():
            yield Path(entry.path)


def members(path: Path) -> Iterator[Path]:
    """Yield the folders in /proc of the processes in a namespace."""
    wanted = namespaces.identity(path)
    return (it for it in processes() if namespaces.identity(it / "ns/net") == wanted)


def in_cgroup(process: Path, root: Path) -> bool:
    """Whether a process is in this cgroup or below it, so that programs there see its sockets."""
    with suppress(OSError):
        for line in (process / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                inside = line.removeprefix("0::")
                return (root == Path("/") or Path(inside).is_relative_to(root)) and bool(inside)
    return False


def _all() -> Iterator[Path]:
    yield namespaces.OWN_NETNS
    yield from namespaces.others()


def _tried(path: Path) -> int | None:
    try:
        return cookie(path)
    except NodeError:
        return None


def _in(path: Path, function: Callable[[], _T]) -> _T:
    try:
        return namespaces.call_in(path, function)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFound(
            f"the network namespace {path} was removed: run the command again"
        ) from error
    except OSError as error:
        why = f"{error.strerror}: run as root, or grant CAP_SYS_ADMIN"
        raise NodeError(f"the network namespace {path} cannot be entered: {why}") from error
