# SPDX-License-Identifier: Apache-2.0
"""Messages of ctnetlink: how they are sent, and where the ones that answer begin and end."""

import os
import socket
import struct
from collections.abc import Iterator, Sequence

from ebpflb.node.netlink_attributes import aligned

SUBSYSTEM = 1 << 8  # NFNL_SUBSYS_CTNETLINK
NEW, GET, DELETE = SUBSYSTEM | 0, SUBSYSTEM | 1, SUBSYSTEM | 2  # IPCTNL_MSG_CT_*
REQUEST_ONLY, REQUEST_AND_DUMP, REQUEST_AND_ACK = 0x1, 0x301, 0x5  # NLM_F_*
ERROR_MESSAGE, DONE_MESSAGE = 2, 3  # NLMSG_ERROR, NLMSG_DONE
_NETFILTER = 12  # NETLINK_NETFILTER

CT_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
FAMILY = struct.Struct("=BBH")  # struct nfgenmsg
ERROR = struct.Struct("=i")  # an errno, or 0
FIRST = CT_HEADER.size + FAMILY.size  # where the first attribute begins: the original tuple
BUFFER_SIZE = 1 << 18


def opened() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)


def dump(attributes: bytes, family: int = socket.AF_UNSPEC) -> Iterator[tuple[bytes, int, int]]:
    """Each entry's message: where it begins and ends in some data. Raises OSError."""
    with opened() as kernel:
        kernel.send(request(GET, REQUEST_AND_DUMP, attributes, family))
        while True:
            for data, at, end in split(kernel.recv(BUFFER_SIZE)):
                kind = CT_HEADER.unpack_from(data, at)[1]
                if kind == NEW:
                    yield data, at, end
                elif kind in (ERROR_MESSAGE, DONE_MESSAGE):
                    (number,) = ERROR.unpack_from(data, at + CT_HEADER.size)
                    if number:
                        raise OSError(-number, os.strerror(-number))
                    return


def split(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    at = 0
    while at < len(data):
        length = CT_HEADER.unpack_from(data, at)[0]
        yield data, at, at + length
        at += aligned(length)


def request(kind: int, flags: int, attributes: bytes, family: int = socket.AF_UNSPEC) -> bytes:
    length = FIRST + len(attributes)
    return CT_HEADER.pack(length, kind, flags, 1, 0) + FAMILY.pack(family, 0, 0) + attributes


def asked(kernel: socket.socket, requests: Sequence[bytes]) -> list[int]:
    """The kernel's answers to requests that ask for an acknowledgement: 0, or a negative errno."""
    kernel.send(b"".join(requests))
    results: list[int] = []
    while len(results) < len(requests):
        for data, at, _ in split(kernel.recv(BUFFER_SIZE)):
            if CT_HEADER.unpack_from(data, at)[1] == ERROR_MESSAGE:
                results += ERROR.unpack_from(data, at + CT_HEADER.size)
    return results
