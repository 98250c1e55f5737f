# SPDX-License-Identifier: Apache-2.0
"""NETLINK_SOCK_DIAG: has the kernel end a socket of this network namespace, whoever holds it.

The socket's owner hears ECONNABORTED (SOCK_DESTROY; TCP 4.5, UDP 4.9). A kernel built without
CONFIG_INET_DIAG_DESTROY says EOPNOTSUPP; one without the protocol's diag module says ENOENT, as
it does where there is no such socket.
"""

import os
import socket
import struct
from ipaddress import ip_address
from typing import NamedTuple

from ebpflb.errors import KernelError
from ebpflb.model.addresses import Address

_SOCK_DIAG, _DESTROY = 4, 21  # NETLINK_SOCK_DIAG, SOCK_DESTROY (uapi/linux/sock_diag.h)
_REQUEST_AND_ACK = 5  # NLM_F_REQUEST | NLM_F_ACK
_ANY_STATE, _ANY_COOKIE = 0xFFFFFFFF, bytes.fromhex("ff" * 8)
_MESSAGE = struct.Struct("=IHHII")  # struct nlmsghdr
_SOCKET = struct.Struct("=BBxxI2s2s16s16sI8s")  # struct inet_diag_req_v2, struct inet_diag_sockid
NOBODY = ip_address("0.0.0.0"), 0


class Ends(NamedTuple):
    """A socket, by its protocol number and what it is bound and connected to."""

    protocol: int
    here: tuple[Address, int]
    there: tuple[Address, int] = NOBODY


def destroy(ends: Ends) -> None:
    """Ends one socket. Raises KernelError: ENOENT, EOPNOTSUPP, or EPERM without CAP_NET_ADMIN."""
    request = _SOCKET.pack(
        socket.AF_INET if ends.here[0].version == 4 else socket.AF_INET6,
        ends.protocol,
        _ANY_STATE,
        *(port.to_bytes(2, "big") for _, port in (ends.here, ends.there)),
        *(address.packed.ljust(16, b"\0") for address, _ in (ends.here, ends.there)),
        0,
        _ANY_COOKIE,
    )
    header = _MESSAGE.pack(_MESSAGE.size + len(request), _DESTROY, _REQUEST_AND_ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.send(header + request)
        answer = kernel.recv(4096)
    (number,) = struct.unpack_from("=i", answer, _MESSAGE.size)
    if number:
        raise KernelError("ending a socket", -number, os.strerror(-number))
