# SPDX-License-Identifier: Apache-2.0
"""What the kernel tells on a netlink socket that has joined a group."""

import socket
import struct
from collections.abc import Collection

_HEADER = struct.Struct("=IH")  # the begin of struct nlmsghdr: length and type
_BUFFER_SIZE = 1 << 16


def tells_of(news: socket.socket, kinds: Collection[int]) -> bool:
    """Whether a message of these types has come, or messages were lost (ENOBUFS); waits for one."""
    try:
        data = news.recv(_BUFFER_SIZE)
    except OSError:
        return True
    at, found = 0, False
    while at < len(data):
        length, kind = _HEADER.unpack_from(data, at)
        found |= kind in kinds
        at += (length + 3) & ~3
    return found
