# SPDX-License-Identifier: Apache-2.0
"""Tuples of ctnetlink: the two directions of an entry, whole, or what a filter knows of them."""

import socket
import struct
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.node.netlink_attributes import attribute, nested
from ebpflb.plan.connections import Ends
from ebpflb.plan.entries import Frontend

ORIGINAL, REPLY = 1, 2  # CTA_TUPLE_ORIG, CTA_TUPLE_REPLY

_IP, _PROTO, _PROTO_NUMBER = 1, 2, 1  # CTA_TUPLE_IP, CTA_TUPLE_PROTO, CTA_PROTO_NUM
_FILTER, _ORIGINAL_FLAGS, _REPLY_FLAGS = 25, 1, 2  # CTA_FILTER, CTA_FILTER_*_FLAGS
_BY_ADDRESS, _BY_PROTOCOL, _BY_PORT = 1 << 0, 1 << 3, 1 << 4  # the next bit: the destination's


class TuplePart(NamedTuple):
    """What is known of a tuple; None is unknown."""

    protocol: int
    source: Address | None = None
    destination: Address | None = None
    source_port: int | None = None
    destination_port: int | None = None

    @property
    def content(self) -> bytes:
        """The content of ORIGINAL or REPLY."""
        proto = attribute(_PROTO_NUMBER, bytes([self.protocol]))
        for kind, port in enumerate((self.source_port, self.destination_port), 2):
            proto += b"" if port is None else attribute(kind, struct.pack(">H", port))
        ip = b""
        for kind, address in enumerate((self.source, self.destination), 1):
            if address is not None:  # CTA_IP_V4_SRC, CTA_IP_V4_DST, CTA_IP_V6_SRC, CTA_IP_V6_DST
                ip += attribute(kind if address.version == 4 else kind + 2, address.packed)
        addresses = nested(_IP, ip) if ip else b""
        return addresses + nested(_PROTO, proto)

    @property
    def flags(self) -> bytes:
        """The flags of a filter that compares everything that is known."""
        addresses, ports = (self.source, self.destination), self[3:]
        flags = _BY_PROTOCOL
        flags |= sum(_BY_ADDRESS << n for n, each in enumerate(addresses) if each is not None)
        flags |= sum(_BY_PORT << n for n, each in enumerate(ports) if each is not None)
        return struct.pack("=I", flags)


def family(address: Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def original(protocol: int, ends: Ends) -> bytes:
    """The attribute of a whole tuple."""
    return nested(ORIGINAL, TuplePart(protocol, *ends).content)


def to(frontend: Frontend) -> TuplePart:
    """What a filter can compare of the original direction of connections to a frontend.

    No IPv6 address: the kernel's filter (5.9 to 6.18 at least) takes those entries whose IPv6
    address is another one. No unspecified address: it means any.
    """
    address, port, protocol = frontend
    known = address if address.version == 4 and not address.is_unspecified else None
    return TuplePart(protocol, destination=known, destination_port=port)


def matching(original: TuplePart, reply: TuplePart | None = None) -> bytes:
    """The attributes of a filter. Linux 5.9 lists entries by it, and 6.12 deletes them by it.

    There is always an original tuple: a kernel that knows no filter, and is asked to delete, looks
    for that one entry, finds the tuple incomplete, and does not delete all entries. Kernels before
    5.15 or so cannot compare replies.
    """
    kept = nested(ORIGINAL, original.content)
    flags = attribute(_ORIGINAL_FLAGS, original.flags)
    if reply:
        kept += nested(REPLY, reply.content)
        flags += attribute(_REPLY_FLAGS, reply.flags)
    return kept + nested(_FILTER, flags)
