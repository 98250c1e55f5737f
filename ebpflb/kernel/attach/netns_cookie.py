# SPDX-License-Identifier: Apache-2.0
"""The cookie of our network namespace, by which the hooks recognize the node's own sockets.

On kernels without SO_NETNS_COOKIE (5.14) bpf/hooks/netns_cookie.c reads the cookie: it is attached
during one call of getsockname(), and changes the result only for a socket with its mark.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebpflb.errors import EbpflbError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.programs import compiler, loader

log = logging.getLogger(__name__)

SO_NETNS_COOKIE = 71
COOKIE_SOURCE = "hooks/netns_cookie.c"
MARK = 0x65626C62  # COOKIE_MARK in netns_cookie.c


def netns_cookie(cache: Path) -> int | None:
    """Return the cookie, or None if neither the kernel nor the program can read it."""
    cookie = by_socket()
    if cookie is not None:
        return cookie
    try:
        return by_program(cache)
    except (EbpflbError, OSError) as error:
        log.debug("the netns cookie program failed: %s", error)
        return None


def by_socket() -> int | None:
    """Read the cookie by the socket option; None if the kernel does not have it (5.14)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            packed = any_socket.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        except OSError:
            return None
    return int.from_bytes(packed, "little")


def by_program(cache: Path) -> int:
    """Read the cookie by the program.

    Raises CompileError, VerifierError, KernelError or OSError.
    """
    with program_attached(cache), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
        address, port = asking.getsockname()
    low = int.from_bytes(socket.inet_aton(address), "little")
    return socket.htons(port) << 32 | low


@contextmanager
def program_attached(cache: Path) -> Iterator[None]:
    """Attach the program without a pin: the kernel removes the link if this process ends."""
    attach = loader.HOOK_TYPES[loader.GETSOCKNAME4]
    code = compiler.compile_source(COOKIE_SOURCE, cache=cache).programs["netns_cookie"]
    opened = [os.open(cgroup_links.cgroup_root(), os.O_RDONLY | os.O_DIRECTORY)]
    try:
        opened.append(loader.load_one("netns_cookie", attach, code))
        opened.append(bpf.link_create(opened[1], opened[0], attach.attach_type))
        yield
    finally:
        for fd in reversed(opened):
            os.close(fd)
