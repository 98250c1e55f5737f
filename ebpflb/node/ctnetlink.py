# SPDX-License-Identifier: Apache-2.0
"""The kernel's table of connections (conntrack) over netlink: entries are listed and deleted.

It may have hundreds of thousands of entries. Of each one only the original destination is read
until the caller has said whether it wants the entry; the rest is decoded only then. Of 100,000
entries that nobody wants a list takes 0.35 s of CPU, and 1.4 s if all are wanted;
pyroute2.NFCTSocket (0.9.7), which decodes each whole entry, takes 8 s. The layout is that of
include/uapi/linux/netfilter/nfnetlink_conntrack.h.
"""

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from ebpflb.errors import NodeError
from ebpflb.model.services import Protocol
from ebpflb.node import ctnetlink_messages as messages
from ebpflb.node.netlink_attributes import ATTRIBUTE, attribute, attributes
from ebpflb.plan.connections import Connection, Ends

# Of an original destination: protocol, packed address (4 or 16 bytes), port.
Wanted = Callable[[int, bytes, int], bool]

_COUNT = Path("/proc/sys/net/netfilter/nf_conntrack_count")
_MOST = Path("/proc/sys/net/netfilter/nf_conntrack_max")

_ORIGINAL, _REPLY, _STATUS, _PROTOINFO, _TIMEOUT, _MARK = 1, 2, 3, 4, 7, 8  # CTA_*
_ID, _ZONE, _FILTER = 12, 18, 25  # CTA_ID, CTA_ZONE, CTA_FILTER
_TUPLE_PROTO, _PROTO_NUMBER = 2, 1  # CTA_TUPLE_PROTO, CTA_PROTO_NUM
_FILTER_ORIGINAL = 1  # CTA_FILTER_ORIG_FLAGS
_FILTER_BY_PROTOCOL = 1 << 3  # of enum ctattr_filter: CTA_PROTO_NUM
_TCP, _TCP_STATE = 1, 1  # CTA_PROTOINFO_TCP, CTA_PROTOINFO_TCP_STATE
_NESTED = 0x8000  # NLA_F_NESTED
_EXPIRED = attribute(_TIMEOUT, bytes(4))

# A tuple as ctnetlink writes it, with its own header; others (ICMP, zones) have other lengths.
_TUPLES = {
    layout.size: layout
    for layout in (
        struct.Struct(f">8x 4x{size}s 4x{size}s 4x 4xB3x 4xH2x 4xH2x") for size in (4, 16)
    )
}
_NO_CTNETLINK = ": load the kernel's module nf_conntrack_netlink"
_TO_DO = {
    errno.EINVAL: _NO_CTNETLINK,
    errno.EPROTONOSUPPORT: _NO_CTNETLINK,
    errno.EPERM: ": CAP_NET_ADMIN is needed",
}
_DELETED_AT_ONCE = 128  # so that all acknowledgements fit into the socket's buffer


def count() -> int:
    """The entries of this network namespace; 0 also where the kernel has no conntrack."""
    return _number(_COUNT)


def limit() -> int:
    """How many entries the table may have; 0 where the kernel has no conntrack."""
    return _number(_MOST)


def connections(wanted: Wanted, protocol: Protocol | None = None) -> Iterator[Connection]:
    """The entries of TCP, UDP and SCTP whose original destination is wanted.

    ``protocol`` lets the kernel leave out the others, where it can (5.9). Raises NodeError.
    """
    return (_connection(data, at, end) for data, at, end in _messages(wanted, protocol))


def find(flows: Iterable[tuple[int, Ends]]) -> Iterator[Connection]:
    """The entries of these flows, by protocol and original direction. Raises NodeError."""
    try:
        with messages.opened() as kernel:
            for protocol, ends in flows:
                family, flow = _original(protocol, ends)
                kernel.send(messages.request(messages.GET, messages.REQUEST_ONLY, flow, family))
                for data, at, end in messages.split(kernel.recv(messages.BUFFER_SIZE)):
                    if messages.CT_HEADER.unpack_from(data, at)[1] == messages.NEW:
                        found = _connection(data, at, end)
                        yield from [found] if found.original == ends else []
    except OSError as error:
        raise NodeError(f"conntrack cannot be read: {_reason(error)}") from error


def _original(protocol: int, ends: Ends) -> tuple[int, bytes]:
    """Its family, and the attribute CTA_TUPLE_ORIG."""
    is_v4 = ends.source.version == 4
    numbers = (1, 2) if is_v4 else (3, 4)  # CTA_IP_V4_SRC, _DST, CTA_IP_V6_SRC, _DST
    packed = zip(numbers, (ends.source.packed, ends.destination.packed), strict=True)
    ports = zip((2, 3), (ends.source_port, ends.destination_port), strict=True)
    proto = attribute(_PROTO_NUMBER, bytes([protocol]))
    proto += b"".join(attribute(kind, struct.pack(">H", port)) for kind, port in ports)
    addresses = b"".join(attribute(kind, address) for kind, address in packed)
    both = attribute(1 | _NESTED, addresses) + attribute(_TUPLE_PROTO | _NESTED, proto)
    return socket.AF_INET if is_v4 else socket.AF_INET6, attribute(_ORIGINAL | _NESTED, both)


def statuses() -> Iterator[int]:
    """The status of every entry, whatever its protocol. Raises OSError."""
    for data, at, end in messages.dump(b""):
        yield _integer(attributes(data, at + messages.FIRST, end), _STATUS)


def delete(entries: Iterable[Connection]) -> int:
    """How many of these were deleted; one that is not there any more is no error.

    An entry that has replaced one of these meanwhile, with another backend, is not deleted: the
    kernel looks for the tuple of replies, and its id (CTA_ID) is a hash of the other tuple.
    Raises NodeError.
    """
    left = list(entries)
    deleted = 0
    try:
        with messages.opened() as kernel:
            while left:
                deleted += _delete(kernel, left[:_DELETED_AT_ONCE])
                del left[:_DELETED_AT_ONCE]
    except OSError as error:
        raise NodeError(f"conntrack entries cannot be deleted: {_reason(error)}") from error
    return deleted


def _delete(kernel: socket.socket, entries: Sequence[Connection]) -> int:
    """Before 6.4 the kernel deletes none that is in a flowtable, but it finds none that expired."""
    results = messages.asked(kernel, [_about(entry, messages.DELETE) for entry in entries])
    offloaded = [e for e, result in zip(entries, results, strict=True) if result == -errno.EBUSY]
    if offloaded:
        messages.asked(kernel, [_about(entry, messages.NEW, _EXPIRED) for entry in offloaded])
        messages.asked(kernel, [_about(entry, messages.GET) for entry in offloaded])
    for result in results:
        if result not in (0, -errno.ENOENT, -errno.EBUSY):
            raise OSError(-result, os.strerror(-result))
    return results.count(0) + len(offloaded)


def _about(entry: Connection, kind: int, more: bytes = b"") -> bytes:
    """Never without the entry's tuple: the kernel would delete all entries."""
    if not entry.identity:
        raise ValueError(f"not from the kernel: {entry}")
    family = socket.AF_INET if entry.original.source.version == 4 else socket.AF_INET6
    return messages.request(kind, messages.REQUEST_AND_ACK, entry.identity + more, family)


def _messages(wanted: Wanted, protocol: Protocol | None) -> Iterator[tuple[bytes, int, int]]:
    if not count():
        return
    try:
        for data, at, end in _dumps(protocol):
            layout = _TUPLES.get(ATTRIBUTE.unpack_from(data, at + messages.FIRST)[0])
            if layout is not None:
                _, address, number, _, port = layout.unpack_from(data, at + messages.FIRST)
                if protocol in (None, number) and wanted(number, address, port):
                    yield data, at, end
    except OSError as error:
        raise NodeError(f"conntrack cannot be listed: {_reason(error)}") from error


def _dumps(protocol: Protocol | None) -> Iterator[tuple[bytes, int, int]]:
    """The kernel filters by protocol only where the family is known. Raises OSError."""
    if protocol is None:
        yield from messages.dump(b"")
    else:
        for family in (socket.AF_INET, socket.AF_INET6):
            yield from messages.dump(_filter(protocol), family)


def _filter(protocol: Protocol) -> bytes:
    """CTA_FILTER, since 5.9; older kernels ignore it."""
    number = attribute(_PROTO_NUMBER, bytes([protocol]))
    proto = attribute(_TUPLE_PROTO | _NESTED, number)
    flags = attribute(_FILTER_ORIGINAL, struct.pack("=I", _FILTER_BY_PROTOCOL))
    return attribute(_ORIGINAL | _NESTED, proto) + attribute(_FILTER | _NESTED, flags)


def _connection(data: bytes, at: int, end: int) -> Connection:
    found = attributes(data, at + messages.FIRST, end)
    info = attributes(found.get(_PROTOINFO, b""))
    tcp = attributes(info.get(_TCP, b""))
    layout = _TUPLES[ATTRIBUTE.size + len(found[_ORIGINAL])]
    protocol, original = _ends(found[_ORIGINAL], layout)
    return Connection(
        protocol,
        original,
        _ends(found[_REPLY], layout)[1],
        status=_integer(found, _STATUS),
        seconds=_integer(found, _TIMEOUT),
        tcp_state=_integer(tcp, _TCP_STATE),
        mark=_integer(found, _MARK),
        identity=attribute(_REPLY | _NESTED, found[_REPLY])
        + b"".join(attribute(kind, found[kind]) for kind in (_ZONE, _ID) if kind in found),
    )


def _reason(error: OSError) -> str:
    """With what to do. nfnetlink answers EINVAL where nobody has registered ctnetlink."""
    return f"{error.strerror}{_TO_DO.get(error.errno or 0, '')}"


def _integer(attributes: Mapping[int, bytes], kind: int) -> int:
    """0 where there is no such attribute."""
    return int.from_bytes(attributes.get(kind, b""), "big")


def _ends(content: bytes, layout: struct.Struct) -> tuple[Protocol, Ends]:
    """A reply's tuple may be longer than the original's, by a zone at its end."""
    packed = ATTRIBUTE.pack(0, 0) + content
    source, destination, protocol, source_port, destination_port = layout.unpack_from(packed)
    ends = ip_address(source), ip_address(destination), source_port, destination_port
    return Protocol(protocol), Ends(*ends)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except OSError:
        return 0
