# SPDX-License-Identifier: Apache-2.0
"""Changes of one nft table that the kernel makes all at once, or not at all; and what is in it.

For parts of nf_tables that pyroute2 does not encode. The layout is that of
include/uapi/linux/netfilter/nf_tables.h.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator

from ebpflb.errors import NodeError
from ebpflb.node.netlink_attributes import ATTRIBUTE, aligned, attribute
from ebpflb.node.nft import TABLE_FAMILIES, Name

# NFT_MSG_*
NEW_TABLE, NEW_CHAIN, DELETE_CHAIN, NEW_RULE, GET_RULE = 0, 3, 5, 6, 7
NEW_SET, DELETE_SET, NEW_ELEMENTS, GET_ELEMENTS, DELETE_ELEMENTS = 9, 11, 12, 13, 14
NEW_FLOWTABLE, GET_FLOWTABLE, DELETE_FLOWTABLE = 22, 23, 24

_NETFILTER = 12  # NETLINK_NETFILTER
_SUBSYSTEM = 10  # NFNL_SUBSYS_NFTABLES
_BEGIN, _END = 0x10, 0x11  # NFNL_MSG_BATCH_*
_REQUEST, _ACK, _DUMP, _ADD = 0x1, 0x4, 0x300, 0xC00  # NLM_F_*; NLM_F_CREATE | NLM_F_APPEND
_ERROR_MESSAGE, _DONE_MESSAGE = 2, 3
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_FAMILY = struct.Struct(">BBH")  # struct nfgenmsg
_ERROR = struct.Struct("=i")  # an errno, or 0
_NESTED = 0x8000  # NLA_F_NESTED
_BUFFER_SIZE = 1 << 18
_SEND_BUFFER = 1 << 22  # SO_SNDBUFFORCE: a whole set of frontends is one transaction


class Refused(NodeError):
    """The kernel's answer; ``number`` is the errno."""

    def __init__(self, table: Name, number: int) -> None:
        super().__init__(f"{table}: {os.strerror(number)}")
        self.number = number


def nested(kind: int, *contents: bytes) -> bytes:
    """An attribute of attributes."""
    return attribute(kind | _NESTED, b"".join(contents))


def text(kind: int, content: str) -> bytes:
    return attribute(kind, content.encode() + b"\0")


def number(kind: int, content: int) -> bytes:
    return attribute(kind, struct.pack(">I", content & 0xFFFFFFFF))


def each(data: bytes) -> Iterator[bytes]:
    """The contents of a list's attributes, which are all of one kind."""
    at = 0
    while at < len(data):
        length, _ = ATTRIBUTE.unpack_from(data, at)
        yield data[at + ATTRIBUTE.size : at + length]
        at += aligned(length)


class Transaction:
    """Messages about one table, in the order in which they are added."""

    def __init__(self, table: Name) -> None:
        self._table = table
        self._messages: list[tuple[int, bytes]] = []

    def __bool__(self) -> bool:
        return bool(self._messages)

    def add(self, kind: int, *attributes: bytes) -> None:
        """A message: what it would make and is there already is no error."""
        self._messages.append((kind, b"".join(attributes)))

    def commit(self) -> None:
        """Raises Refused, and NodeError where there is no nf_tables."""
        family, last = TABLE_FAMILIES[self._table.family], len(self._messages)
        data = _message(_BEGIN, _REQUEST, 0, 0, b"", resource=_SUBSYSTEM)
        for sequence, (kind, attributes) in enumerate(self._messages, start=1):
            flags = _REQUEST | _ADD | (_ACK if sequence == last else 0)
            data += _message(_SUBSYSTEM << 8 | kind, flags, sequence, family, attributes)
        data += _message(_END, _REQUEST, last + 1, 0, b"", resource=_SUBSYSTEM)
        try:
            with _opened() as kernel:
                kernel.send(data)
                refusal = _first_refusal(kernel, last)
        except OSError as error:
            raise Refused(self._table, error.errno or errno.EIO) from error
        if refusal:
            raise Refused(self._table, refusal)


def dump(table: Name, kind: int, *attributes: bytes) -> list[bytes]:
    """The attributes of each thing that the kernel lists; none where it has no such table.

    Raises Refused.
    """
    family = TABLE_FAMILIES[table.family]
    request = _message(
        _SUBSYSTEM << 8 | kind, _REQUEST | _DUMP, 1, family, b"".join(attributes), resource=0
    )
    try:
        with _opened() as kernel:
            kernel.send(request)
            return list(_listed(kernel))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL):
            return []
        raise Refused(table, error.errno or errno.EIO) from error


def _opened() -> socket.socket:
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
    kernel.setsockopt(socket.SOL_SOCKET, 32, _SEND_BUFFER)  # SO_SNDBUFFORCE
    return kernel


def _message(
    kind: int, flags: int, sequence: int, family: int, attributes: bytes, *, resource: int = 0
) -> bytes:
    length = _HEADER.size + _FAMILY.size + len(attributes)
    head = _HEADER.pack(length, kind, flags, sequence, 0) + _FAMILY.pack(family, 0, resource)
    return head + attributes


def _first_refusal(kernel: socket.socket, last: int) -> int:
    """The first message's that was refused; 0 after the last one's acknowledgement. Raises
    OSError.
    """
    while True:
        for kind, sequence, content in _split(kernel.recv(_BUFFER_SIZE)):
            result: int = _ERROR.unpack_from(content)[0] if kind == _ERROR_MESSAGE else 0
            if result or sequence == last:
                return -result


def _listed(kernel: socket.socket) -> Iterator[bytes]:
    """Raises OSError."""
    while True:
        for kind, _, content in _split(kernel.recv(_BUFFER_SIZE)):
            if kind in (_ERROR_MESSAGE, _DONE_MESSAGE):
                (result,) = _ERROR.unpack_from(content)
                if result:
                    raise OSError(-result, os.strerror(-result))
                return
            yield content[_FAMILY.size :]


def _split(data: bytes) -> Iterable[tuple[int, int, bytes]]:
    """Type, sequence number and content of each message."""
    at = 0
    while at < len(data):
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, at)
        yield kind, sequence, data[at + _HEADER.size : at + length]
        at += aligned(length)
