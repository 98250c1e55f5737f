# SPDX-License-Identifier: Apache-2.0
"""The network namespaces of this node: a function is called in each of them.

They are found by the names that container runtimes give them and by the processes inside them; a
namespace with neither is not found. Entering a namespace takes CAP_SYS_ADMIN, and finding it by
another user's process CAP_SYS_PTRACE too.
"""

import errno
import logging
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from fcntl import ioctl
from functools import partial
from pathlib import Path
from socket import socket
from struct import Struct
from typing import TypeVar

from ebpflb.kernel import bpf, libc, netlink
from ebpflb.kernel.attach.netns_cookie import by_socket

log = logging.getLogger(__name__)

PROCESSES = Path("/proc")
OWN_NETNS = Path("/proc/thread-self/ns/net")
NAMED = tuple(map(Path, ("/run/netns", "/var/run/netns", "/run/docker/netns")))
HOST_NAME = 0x04000000  # CLONE_NEWUTS
_GET_TYPE = 0xB703  # ioctl NS_GET_NSTYPE, ioctl_ns(2)
_GET_ID = 90  # RTM_GETNSID
_ID, _DESCRIPTOR = 1, 3  # NETNSA_NSID, NETNSA_FD
_GENERIC = bytes(4)  # struct rtgenmsg, padded
_NUMBER = Struct("=i")
_NOT_LINKED = _NUMBER.pack(-1)  # NETNSA_NSID_NOT_ASSIGNED

_Identity = tuple[int, int]
_T = TypeVar("_T")


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

        With ``cookies`` only in the namespaces that have them: those that are known to, then
        unknown ones, and others as long as a cookie is not found; all of them before Linux 5.14,
        which tells no cookies. Namespaces that cannot be entered, because they were deleted or it
        is forbidden, are skipped.
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
        cookie, place = by_socket(), identity(OWN_NETNS)
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
                "pods' network namespaces cannot be entered: CAP_SYS_ADMIN is missing; stale UDP "
                "sockets of pods are not ended"
            )


def call_in(path: Path, function: Callable[[], _T], kind: int = libc.NEW_NETWORK) -> _T:
    """Call the function in a new thread that enters the namespace; no other thread enters it.

    ``kind`` is the kind of namespace. Raises OSError if the namespace cannot be entered, or is of
    another kind.
    """

    def enter_and_call() -> _T:
        enter(path, kind)
        return function()

    with ThreadPoolExecutor(1, "namespace") as thread:
        return thread.submit(enter_and_call).result()


def call_in_new(function: Callable[[], _T]) -> _T:
    """Call the function in a thread with a network namespace that ends with the thread.

    Raises OSError.
    """

    def leave_and_call() -> _T:
        try:
            libc.unshare(libc.NEW_NETWORK)
        except OSError as error:
            raise OSError(error.errno, f"cannot make a namespace: {error.strerror}") from error
        return function()

    with ThreadPoolExecutor(1, "namespace") as thread:
        return thread.submit(leave_and_call).result()


def enter(path: Path, kind: int) -> None:
    """Move this thread into the namespace; into its own it needs no right. Raises OSError."""
    if identity(path) == identity(OWN_NETNS):
        return
    with _open(path) as namespace:
        try:
            libc.setns(namespace, kind)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def _open(path: Path) -> AbstractContextManager[int]:
    """Open a namespace; any other file opens at once too. Raises OSError."""
    return bpf.closing(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


def is_network(path: Path) -> bool:
    """Whether this is a network namespace. Raises PermissionError."""
    try:
        with _open(path) as namespace:
            return ioctl(namespace, _GET_TYPE) == libc.NEW_NETWORK
    except PermissionError:
        raise
    except (OSError, ValueError):  # no namespace; a NUL in the path
        return False


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


def _is_linked(kernel: socket, path: Path) -> bool:
    """Whether a device of ours leads to the namespace: the kernel numbers such namespaces."""
    with _open(path) as namespace:
        asked = _GENERIC + netlink.attribute(_DESCRIPTOR, _NUMBER.pack(namespace))
        answer = netlink.request(kernel, _GET_ID, asked)
    return netlink.attributes(answer, len(_GENERIC)).get(_ID, _NOT_LINKED) != _NOT_LINKED


def _paths() -> Iterator[Path]:
    """Yield names first: they last longer than processes, and reading them takes no capability."""
    for folder in NAMED:
        yield from sorted(folder.iterdir()) if folder.is_dir() else ()
    for entry in os.scandir(PROCESSES):
        if entry.name.isdigit():
            yield Path(entry.path) / "ns/net"


def identity(path: Path) -> _Identity | None:
    """Return the identity of a namespace, however it is reached; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
