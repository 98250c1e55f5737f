# SPDX-License-Identifier: Apache-2.0
"""Fills the conntrack of this network namespace by netlink, and empties it.

nf_conntrack_max cannot be lowered for one namespace, but each may have as many as it says.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab.hosts import Host
from ebpflb.plan.flow_entries import STATUS
from tests.kernel.node import nodes

_NETFILTER = 12  # NETLINK_NETFILTER
_NEW, _DELETE = 1 << 8, 1 << 8 | 2  # IPCTNL_MSG_CT_NEW, _DELETE
_REQUEST, _ACK, _CREATE, _EXCLUSIVE = 1, 4, 0x400, 0x200  # NLM_F_*
_NESTED = 0x8000
_ORIGINAL, _REPLY, _STATUS, _TIMEOUT = 1, 2, 3, 7  # CTA_*
_IP, _PROTO = 1, 2  # CTA_TUPLE_IP, CTA_TUPLE_PROTO
_ONE, _OTHER = 0x0A800000, 0x0AC00000  # 10.128.0.0, 10.192.0.0
_SECONDS = 600
_AT_ONCE = 200


@contextmanager
def full(node: Host, *, free: int = 0) -> Iterator[None]:
    """The node's conntrack has connections that the kernel keeps, and so many free entries."""
    with nodes.entered(node.netns):
        fill(free)
    try:
        yield
    finally:
        with nodes.entered(node.netns):
            empty()


def fill(free: int) -> None:
    """Until so many are free, with entries that the kernel takes from nobody. Raises OSError."""
    status = STATUS["seen-reply"] | STATUS["confirmed"] | STATUS["assured"]
    rest = _attribute(_STATUS, struct.pack(">I", status))
    rest += _attribute(_TIMEOUT, struct.pack(">I", _SECONDS))
    missing = conntrack.limit() - conntrack.count() - free
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER) as kernel:
        for first in range(0, missing, _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, missing))
            kernel.send(b"".join(_new(number, rest) for number in numbers))


def empty() -> None:
    """Deletes all entries. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER) as kernel:
        kernel.send(_message(_DELETE, _REQUEST | _ACK, b""))
        kernel.recv(1 << 16)


def _new(number: int, rest: bytes) -> bytes:
    """Of UDP, from one address and port of its own to another."""
    tuples = _tuple(_ORIGINAL, _ONE + number, _OTHER) + _tuple(_REPLY, _OTHER, _ONE + number)
    return _message(_NEW, _REQUEST | _CREATE | _EXCLUSIVE, tuples + rest)


def _tuple(kind: int, source: int, destination: int) -> bytes:
    ip = _attribute(1, struct.pack(">I", source)) + _attribute(2, struct.pack(">I", destination))
    port = struct.pack(">H", 1000)
    proto = _attribute(1, bytes([socket.IPPROTO_UDP])) + _attribute(2, port) + _attribute(3, port)
    nested = _attribute(_IP | _NESTED, ip) + _attribute(_PROTO | _NESTED, proto)
    return _attribute(kind | _NESTED, nested)


def _attribute(kind: int, content: bytes) -> bytes:
    whole = struct.pack("=HH", 4 + len(content), kind) + content
    return whole + bytes(-len(whole) % 4)


def _message(kind: int, flags: int, attributes: bytes) -> bytes:
    head = struct.pack("=IHHII", 20 + len(attributes), kind, flags, 1, 0)
    return head + struct.pack("=BBH", socket.AF_INET, 0, 0) + attributes
