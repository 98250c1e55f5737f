# SPDX-License-Identifier: Apache-2.0
"""Netlink messages and their attributes: packed for the kernel, and split as it sends them."""

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Union

NETFILTER = 12  # NETLINK_NETFILTER
REQUEST, ACK, ECHO, DUMP = 0x1, 0x4, 0x8, 0x300  # NLM_F_*
REPLACE, NEW = 0x500, 0x600  # NLM_F_CREATE with NLM_F_REPLACE, or with NLM_F_EXCL
ERROR, DONE = 2, 3  # NLMSG_ERROR, NLMSG_DONE
_SOL_NETLINK, _ADD_MEMBERSHIP, _STRICT = 270, 1, 12  # the last: NETLINK_GET_STRICT_CHK (4.20)
_INTERRUPTED = 0x10  # NLM_F_DUMP_INTR
_ATTEMPTS = 10  # for a list during which nothing changes
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_ERRNO = struct.Struct("=i")
_BUFFER_SIZE = 1 << 16


def packed(kind: int, flags: int, content: bytes, sequence: int = 1) -> bytes:
    """Return a message as it is sent."""
    return _HEADER.pack(_HEADER.size + len(content), kind, flags, sequence, 0) + content


def split(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield kind, flags and number of each message, and where its content begins and ends."""
    at = 0
    while at < len(data):
        length, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
        yield kind, flags, sequence, at + _HEADER.size, at + length
        at += aligned(length)


def error_number(data: bytes, begin: int) -> int:
    """Return the errno, or 0, at the beginning of an ERROR's or DONE's content."""
    return -int(_ERRNO.unpack_from(data, begin)[0])


class Subscription:
    """The kernel's messages about changes, in its creator's network namespace.

    ``groups`` are the numbers of multicast groups (RTNLGRP_*, NFNLGRP_*).
    """

    def __init__(self, *groups: int, protocol: int = socket.NETLINK_ROUTE) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        self.fileno, self.close = self._socket.fileno, self._socket.close
        self._socket.bind((0, 0))
        for group in groups:
            self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)

    def take(self) -> list[tuple[int, bytes]] | None:
        """Return type and content of all messages so far; None if some were lost (ENOBUFS)."""
        taken: list[tuple[int, bytes]] = []
        try:
            while data := self._socket.recv(_BUFFER_SIZE, socket.MSG_DONTWAIT):
                taken += [(kind, data[begin:end]) for kind, _, _, begin, end in split(data)]
        except BlockingIOError:
            return taken
        except OSError:
            return None
        return taken

    def has_news(self, is_news: Callable[[int, bytes], bool]) -> bool:
        """Take all messages; return whether one is news, or some were lost."""
        taken = self.take()
        return taken is None or any(is_news(*message) for message in taken)


def request(kernel: socket.socket, kind: int, content: bytes, flags: int = 0) -> bytes:
    """Return the content of the answer; b"" for an acknowledgement. Raises OSError."""
    kernel.send(packed(kind, REQUEST | flags, content))
    data = kernel.recv(_BUFFER_SIZE)
    answer, _, _, begin, end = next(split(data))
    if answer != ERROR:
        return data[begin:end]
    if number := error_number(data, begin):
        raise OSError(number, os.strerror(number))
    return b""


def route_socket() -> socket.socket:
    """Return a socket for requests to rtnetlink in the thread's network namespace."""
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)


def dump(
    kind: int, content: bytes, protocol: int = socket.NETLINK_ROUTE, *, strict: bool = False
) -> list[bytes]:
    """Return the content of each object that the kernel lists, at one time. Raises OSError.

    ``strict``: rtnetlink lists only the objects that the request's header selects.
    """
    for _ in range(_ATTEMPTS):
        with suppress(InterruptedError):
            return list(_dumped(kind, content, protocol, strict=strict))
    raise OSError(errno.EAGAIN, "the list changes all the time")


def _dumped(kind: int, content: bytes, protocol: int, *, strict: bool) -> Iterator[bytes]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as kernel:
        if strict:
            kernel.setsockopt(_SOL_NETLINK, _STRICT, 1)
        kernel.send(packed(kind, REQUEST | DUMP, content))
        yield from contents(kernel)


def parts(
    kernel: socket.socket, size: int = _BUFFER_SIZE
) -> Iterator[tuple[bytes, list[tuple[int, int]]]]:
    """Yield the parts of an answer of several messages, as the kernel sends them.

    A part is the received data, and where each message's content begins and ends in it. Raises
    OSError at the end if the kernel reports an error, and InterruptedError if a list has changed
    meanwhile.
    """
    interrupted, result = 0, None
    while result is None:
        data, places = kernel.recv(size), list[tuple[int, int]]()
        for kind, flags, _, begin, end in split(data):
            interrupted |= flags & _INTERRUPTED
            if kind in (ERROR, DONE):
                result = error_number(data, begin)
            else:
                places.append((begin, end))
        yield data, places
    if number := result or (interrupted and errno.EINTR):
        raise OSError(number, os.strerror(number))


def contents(kernel: socket.socket) -> Iterator[bytes]:
    """Yield the content of each message of an answer, with the errors of ``parts``."""
    for data, places in parts(kernel):
        yield from (data[begin:end] for begin, end in places)


ATTRIBUTE = struct.Struct("=HH")  # struct nlattr
NESTED = 0x8000  # NLA_F_NESTED
_TYPE = 0x3FFF  # NLA_TYPE_MASK


def attributes(data: bytes, at: int = 0, end: int | None = None) -> dict[int, bytes]:
    """Return kind -> content of the attributes in a range of the data."""
    found, end = {}, len(data) if end is None else end
    while at < end:
        length, kind = ATTRIBUTE.unpack_from(data, at)
        found[kind & _TYPE] = data[at + ATTRIBUTE.size : at + length]
        at += aligned(length)
    return found


def attribute(kind: int, content: bytes) -> bytes:
    """Return an attribute in the format that is sent."""
    length = ATTRIBUTE.size + len(content)
    return (ATTRIBUTE.pack(length, kind) + content).ljust(aligned(length), b"\0")


def nested(kind: int, *contents: bytes) -> bytes:
    """Return an attribute that contains attributes."""
    return attribute(kind | NESTED, b"".join(contents))


def text(kind: int, content: str) -> bytes:
    return attribute(kind, to_text(content))


def to_text(content: str) -> bytes:
    return content.encode() + b"\0"


def from_text(content: bytes) -> str:
    """The inverse of to_text."""
    return content.removesuffix(b"\0").decode(errors="replace")


def to_number(content: int) -> bytes:
    """Return a number in network order, as in nf_tables."""
    return struct.pack(">I", content & 0xFFFFFFFF)


def list_items(data: bytes) -> Iterator[bytes]:
    """Yield the contents of a list's attributes, which are all of one kind."""
    at = 0
    while at < len(data):
        length, _ = ATTRIBUTE.unpack_from(data, at)
        yield data[at + ATTRIBUTE.size : at + length]
        at += aligned(length)


def aligned(length: int) -> int:
    """Return the distance to the next attribute; never 0, so that every reader ends."""
    return (length + 3) & ~3 or 4


# Nested netlink attributes as data: for sending, and for comparing with the kernel's.

Tree = Mapping[int, Union[bytes, "Tree", Sequence["Tree"]]]
"""Kind -> content. A list has attributes of kind 1 (NFTA_LIST_ELEM)."""

_LIST_ITEM = 1


def encode(tree: Tree) -> bytes:
    """Return the attributes in the order of the tree."""
    return b"".join(_encode_one(kind, content) for kind, content in tree.items())


def _encode_one(kind: int, content: bytes | Tree | Sequence[Tree]) -> bytes:
    if isinstance(content, bytes):
        return attribute(kind, content)
    if isinstance(content, Mapping):
        return nested(kind, encode(content))
    return nested(kind, *(_encode_one(_LIST_ITEM, item) for item in content))


def has_attributes(data: bytes, tree: Tree) -> bool:
    """Whether all attributes of the tree are in the data; the data may have more.

    Within a nested attribute all others must be 0: newer kernels send more attributes. An empty
    tree matches any content. The kernel leaves out some attributes that are 0.
    """
    existing = attributes(data)
    return all(_equals(existing.get(kind), content) for kind, content in tree.items())


def _equals(data: bytes | None, content: bytes | Tree | Sequence[Tree]) -> bool:
    if data is None:
        return isinstance(content, bytes) and not any(content)
    if isinstance(content, bytes):
        return data == content
    if isinstance(content, Mapping):
        others = (value for kind, value in attributes(data).items() if kind not in content)
        return not content or (has_attributes(data, content) and not any(map(any, others)))
    items = list(list_items(data))
    return len(items) == len(content) and all(map(has_attributes, items, content))
