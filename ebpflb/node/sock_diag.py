# SPDX-License-Identifier: Apache-2.0
"""NETLINK_SOCK_DIAG: which sockets of a network namespace are connected, and ending one of them.

A socket is ended by the id and the cookie by which the kernel has listed it, so never one that
has come in its place. Its owner hears ECONNABORTED, and a datagram socket keeps its own port
(SOCK_DESTROY; TCP 4.5, UDP 4.9). A kernel built without CONFIG_INET_DIAG_DESTROY says EOPNOTSUPP;
one without the protocol's diag module (udp_diag) says ENOENT, as it does where there is no such
socket.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from ebpflb.errors import KernelError
from ebpflb.model.addresses import Address

_SOCK_DIAG, _LIST, _DESTROY = 4, 20, 21  # NETLINK_SOCK_DIAG, SOCK_* (uapi/linux/sock_diag.h)
_REQUEST, _ACK, _DUMP = 1, 4, 0x300  # NLM_F_*
_ERROR, _DONE = 2, 3  # NLMSG_*
_CONNECTED = 1 << 1  # TCP_ESTABLISHED: so a datagram socket that has a peer is called too
_BUFFER = 1 << 16
_SO_COOKIE = 57
_LOOPBACK = "127.0.0.1"
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_SOCKET = struct.Struct("=BBxxI48s")  # struct inet_diag_req_v2
_LISTED = struct.Struct("=Bxxx48s")  # struct inet_diag_msg: its beginning


class Connected(NamedTuple):
    """A socket that has a peer; ``id`` is the kernel's own for it, cookie and all."""

    protocol: int
    family: int  # AF_INET6 also where its ends are v4-mapped
    id: bytes

    @property
    def here(self) -> tuple[Address, int]:
        return self._end(4, 0)

    @property
    def there(self) -> tuple[Address, int]:
        return self._end(20, 2)

    @property
    def cookie(self) -> int:
        return int.from_bytes(self.id[40:48], "little")

    def _end(self, address: int, port: int) -> tuple[Address, int]:
        packed = self.id[address : address + 16]
        number = int.from_bytes(self.id[port : port + 2], "big")
        if self.family == socket.AF_INET:
            return IPv4Address(packed[:4]), number
        found = IPv6Address(packed)
        return found.ipv4_mapped or found, number


class SockDiag:
    """Speaks about the network namespace in which it was made, wherever it is used."""

    def __init__(self) -> None:
        """Raises KernelError where the kernel has no sock_diag."""
        try:
            self.kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
        except OSError as error:
            raise KernelError("sock_diag", error.errno or 0, error.strerror or "") from error

    def __enter__(self) -> "SockDiag":
        return self

    def __exit__(self, *_: object) -> None:
        self.kernel.close()

    def connected(self, protocol: int, port: int = 0) -> Iterator[Connected]:
        """All sockets with a peer; ``port``: with a peer on that port.

        Raises KernelError: ENOENT where the protocol has no diag module.
        """
        wanted = bytes(2) + port.to_bytes(2, "big")
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _SOCKET.pack(family, protocol, _CONNECTED, wanted.ljust(48, b"\0"))
            for body in self._ask(_LIST, _DUMP, request):
                yield Connected(protocol, *_LISTED.unpack_from(body))

    def destroy(self, one: Connected) -> bool:
        """Ends it; False where the kernel finds no such socket, or another of the same ends.

        Raises KernelError: EOPNOTSUPP, or EPERM without CAP_NET_ADMIN.
        """
        request = _SOCKET.pack(one.family, one.protocol, 0xFFFFFFFF, one.id)
        try:
            list(self._ask(_DESTROY, _ACK, request))
        except KernelError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        return True

    def _ask(self, what: int, flags: int, request: bytes) -> Iterator[bytes]:
        """The bodies of the answers."""
        header = _HEADER.pack(_HEADER.size + len(request), what, _REQUEST | flags, 1, 0)
        self.kernel.send(header + request)
        while True:
            answer = self.kernel.recv(_BUFFER)
            at = 0
            while at < len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, at)
                body = answer[at + _HEADER.size : at + length]
                if kind in (_ERROR, _DONE):
                    _check(body)
                    return
                yield body
                at += (length + 3) // 4 * 4


def _check(body: bytes) -> None:
    """The end of a list and the answer to a request begin with an error's number, or 0."""
    (number,) = struct.unpack_from("=i", body)
    if number:
        raise KernelError("sock_diag", -number, os.strerror(-number))


def can_destroy() -> bool:
    """Whether the kernel ends a datagram socket when it is asked to (INET_DIAG_DESTROY): tried."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as victim:
        try:
            victim.bind((_LOOPBACK, 0))
            victim.connect(victim.getsockname())
            _end(victim)
        except (KernelError, OSError):
            return False
        return victim.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNABORTED


def _end(victim: socket.socket) -> None:
    cookie = int.from_bytes(victim.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8), "little")
    with SockDiag() as diag:
        listed = list(diag.connected(socket.IPPROTO_UDP, victim.getsockname()[1]))
        for one in listed:
            if one.cookie == cookie:
                diag.destroy(one)


def can_list() -> bool:
    """Whether the kernel lists datagram sockets (module udp_diag): tried."""
    try:
        with SockDiag() as diag:
            list(diag.connected(socket.IPPROTO_UDP, 1))
    except KernelError:
        return False
    return True
