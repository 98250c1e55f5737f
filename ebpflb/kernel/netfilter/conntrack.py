# SPDX-License-Identifier: Apache-2.0
"""The kernel's table of connections (conntrack) over netlink: entries are listed and deleted.

The table may have hundreds of thousands of entries. Of each entry only the original destination is
read until the caller has said whether it wants the entry; only then the rest is decoded. A list of
100,000 unwanted entries takes 0.35 s of CPU, and 1.4 s if all are wanted; pyroute2.NFCTSocket
(0.9.7), which decodes each whole entry, takes 8 s. The layout is that of
include/uapi/linux/netfilter/nfnetlink_conntrack.h.
"""

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from ebpflb.entries.flows import DESTINATION_NAT, SOURCE_NAT, Connection, Ends
from ebpflb.errors import NodeError
from ebpflb.kernel.netlink import (
    ACK,
    ATTRIBUTE,
    DUMP,
    ERROR,
    NETFILTER,
    REQUEST,
    attribute,
    attributes,
    error_number,
    nested,
    packed,
    parts,
    split,
)
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol

# Messages of ctnetlink: sending them, and finding the beginning and end of answers.

SUBSYSTEM = 1 << 8  # NFNL_SUBSYS_CTNETLINK
NEW, GET, DELETE = SUBSYSTEM | 0, SUBSYSTEM | 1, SUBSYSTEM | 2  # IPCTNL_MSG_CT_*
FAMILY = struct.Struct("=BBH")  # struct nfgenmsg; then the attributes begin
BUFFER_SIZE = 1 << 18


def open_ctnetlink() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER)


def dump(attributes: bytes, family: int = socket.AF_UNSPEC) -> Iterator[tuple[bytes, int, int]]:
    """Yield the attributes of each entry: the data, and where they begin and end in it.

    Raises OSError.
    """
    with open_ctnetlink() as kernel:
        kernel.send(request(GET, REQUEST | DUMP, attributes, family))
        for data, places in parts(kernel, BUFFER_SIZE):
            for begin, end in places:
                yield data, begin + FAMILY.size, end


def request(kind: int, flags: int, attributes: bytes, family: int = socket.AF_UNSPEC) -> bytes:
    return packed(kind, flags, FAMILY.pack(family, 0, 0) + attributes)


def asked(kernel: socket.socket, requests: Sequence[bytes]) -> list[int]:
    """Send requests with acknowledgements; return the kernel's answers: an errno, or 0."""
    kernel.send(b"".join(requests))
    results: list[int] = []
    while len(results) < len(requests):
        data = kernel.recv(BUFFER_SIZE)
        results += [error_number(data, each[3]) for each in split(data) if each[0] == ERROR]
    return results


# Tuples of ctnetlink: the two directions of an entry, complete, or the parts that a filter knows.

ORIGINAL, REPLY = 1, 2  # CTA_TUPLE_ORIG, CTA_TUPLE_REPLY

_STATUS, _STATUS_MASK = 3, 26  # CTA_STATUS, CTA_STATUS_MASK
_IP, _PROTO, _PROTO_NUMBER = 1, 2, 1  # CTA_TUPLE_IP, CTA_TUPLE_PROTO, CTA_PROTO_NUM
FILTER, _ORIGINAL_FLAGS, _REPLY_FLAGS = 25, 1, 2  # CTA_FILTER, CTA_FILTER_*_FLAGS
_BY_SOURCE, _BY_PROTOCOL, _BY_SOURCE_PORT = 1 << 0, 1 << 3, 1 << 4


class TuplePart(NamedTuple):
    """The known parts of a tuple; None is unknown."""

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


def family(address: Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def protocol_filter(protocol: Protocol) -> bytes:
    """Return the attributes of a filter by protocol, for Linux 5.9 and later."""
    return nested(ORIGINAL, TuplePart(protocol).content) + nested(
        FILTER, attribute(_ORIGINAL_FLAGS, struct.pack("=I", _BY_PROTOCOL))
    )


def endpoint_filter(protocol: Protocol, address: Address, port: int) -> bytes:
    """Return the attributes of a filter by the answering endpoint, for Linux 5.9 and later.

    With IPv6 by the port alone: the kernel would list all addresses except this one.
    """
    v4 = address.version == 4
    answers = TuplePart(protocol, source=address if v4 else None, source_port=port)
    flags = _BY_PROTOCOL | _BY_SOURCE_PORT | (_BY_SOURCE if v4 else 0)
    kept = attribute(_REPLY_FLAGS, struct.pack("=I", flags))
    return nested(REPLY, answers.content) + nested(FILTER, kept)


def status_filter(without: int = 0, having: int = 0) -> bytes:
    """Return the attributes of a filter by the status: none of these bits, and all of those.

    A kernel that does not know this filter ignores it and lists all entries. One is not 0.
    """
    wanted, mask = (struct.pack(">I", bits) for bits in (having, without | having))
    return attribute(_STATUS, wanted) + attribute(_STATUS_MASK, mask)


# Called with the original destination: protocol, packed address (4 or 16 bytes), port.
Wanted = Callable[[int, bytes, int], bool]
# The same, and the reply's source: packed address, port.
MayBe = Callable[[int, bytes, int, bytes, int], bool]

COUNT = Path("/proc/sys/net/netfilter/nf_conntrack_count")
MOST = Path("/proc/sys/net/netfilter/nf_conntrack_max")

_PROTOINFO, _TIMEOUT, _MARK, _ID, _ZONE = 4, 7, 8, 12, 18  # CTA_*
_TCP, _TCP_STATE = 1, 1  # CTA_PROTOINFO_TCP, CTA_PROTOINFO_TCP_STATE
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
_FAMILIES: Sequence[int] = (socket.AF_INET, socket.AF_INET6)
_ALL_PORTS = range(1 << 16)
_DELETED_AT_ONCE = 128  # all acknowledgements must fit into the socket's buffer


def _any(*_: object) -> bool:
    return True


def count() -> int:
    """Return the entries of this network namespace; 0 also if the kernel has no conntrack."""
    return _number(COUNT)


def limit() -> int:
    """Return the maximum number of entries; 0 if the kernel has no conntrack."""
    return _number(MOST)


def connections(
    wanted: Wanted,
    protocol: Protocol | None = None,
    *,
    without: int = 0,
    may_be: MayBe = _any,
    endpoint: tuple[Address, int] | None = None,
) -> Iterator[Connection]:
    """Yield the entries of TCP, UDP and SCTP whose original destination is wanted.

    Only those that ``may_be`` wants too are decoded whole. With ``protocol`` the kernel leaves out
    the other protocols, if it can (5.9), and with ``endpoint`` what this endpoint does not answer.
    With ``without`` it leaves out the entries with one of these bits in their status. To leave out
    100,000 entries then takes 0.03 s of CPU instead of 1.4 s. Raises NodeError.
    """
    families = _FAMILIES if protocol else (socket.AF_UNSPEC,)  # a filter needs a family
    kept = protocol_filter(protocol) if protocol else b""
    if protocol and endpoint:
        families, kept = (family(endpoint[0]),), endpoint_filter(protocol, *endpoint)
    kept += status_filter(without) if without else b""

    def is_wanted(number: int, address: bytes, port: int) -> bool:
        return protocol in (None, number) and wanted(number, address, port)

    listed = (entry for each in families for entry in _listed(kept, each, is_wanted, may_be))
    return (entry for entry in listed if not entry.status & without)


def masqueraded(first: int, last: int) -> Iterator[Connection]:
    """Yield the entries whose destination and source are translated, the source to one of these
    ports. Raises NodeError.
    """
    both, taken = SOURCE_NAT | DESTINATION_NAT, range(first, last + 1)
    listed = _listed(status_filter(having=both), socket.AF_UNSPEC, _any, _any, taken)
    return (entry for entry in listed if entry.status & both == both)


def find(flows: Iterable[tuple[int, Ends]], direction: int = ORIGINAL) -> Iterator[Connection]:
    """Yield the entries of these flows, by protocol and the ends of one direction.

    The kernel finds each entry by a hash. Raises NodeError.
    """
    try:
        with open_ctnetlink() as kernel:
            for protocol, ends in flows:
                flow = nested(direction, TuplePart(protocol, *ends).content)
                kernel.send(request(GET, REQUEST, flow, family(ends.source)))
                data = kernel.recv(BUFFER_SIZE)
                for kind, _, _, begin, end in split(data):
                    if kind == NEW:
                        found = _connection(data, begin + FAMILY.size, end)
                        known = found.original if direction == ORIGINAL else found.reply
                        yield from [found] if known == ends else []
    except OSError as error:
        raise NodeError(f"conntrack cannot be read: {_reason(error)}") from error


def statuses() -> Iterator[int]:
    """Yield the status of every entry, of any protocol. Raises OSError."""
    for data, at, end in dump(b""):
        yield _integer(attributes(data, at, end), _STATUS)


def delete(entries: Iterable[Connection]) -> int:
    """Delete these entries; return how many were deleted. A missing entry is no error.

    If another entry with another backend has replaced one of these meanwhile, it is not deleted:
    the kernel looks for the tuple of replies, and its id (CTA_ID) is a hash of the other tuple.
    Raises NodeError.
    """
    left = list(entries)
    deleted = 0
    try:
        with open_ctnetlink() as kernel:
            while left:
                deleted += _delete(kernel, left[:_DELETED_AT_ONCE])
                del left[:_DELETED_AT_ONCE]
    except OSError as error:
        raise NodeError(f"conntrack entries cannot be deleted: {_reason(error)}") from error
    return deleted


def _delete(kernel: socket.socket, entries: Sequence[Connection]) -> int:
    """Delete the entries; return how many were deleted.

    Before 6.4 the kernel refuses to delete entries in a flowtable, and those must expire first.
    """
    results = asked(kernel, [_about(entry, DELETE) for entry in entries])
    offloaded = [e for e, result in zip(entries, results, strict=True) if result == errno.EBUSY]
    if offloaded:
        asked(kernel, [_about(entry, NEW, _EXPIRED) for entry in offloaded])
        asked(kernel, [_about(entry, GET) for entry in offloaded])
    for result in results:
        _raise_unless_done(result, errno.ENOENT, errno.EBUSY)
    return results.count(0) + len(offloaded)


def _raise_unless_done(result: int, *also_fine: int) -> None:
    if result not in (0, *also_fine):
        raise OSError(result, os.strerror(result))


def _about(entry: Connection, kind: int, more: bytes = b"") -> bytes:
    """Return a request about an entry.

    It always contains the entry's tuple: otherwise the kernel would delete all entries.
    """
    if not entry.identity:
        raise ValueError(f"not from the kernel: {entry}")
    attributes_sent = entry.identity + more
    return request(kind, REQUEST | ACK, attributes_sent, family(entry.original.source))


def _listed(
    kept: bytes, family: int, wanted: Wanted, may_be: MayBe, answered: range = _ALL_PORTS
) -> Iterator[Connection]:
    """Yield the wanted entries; ``kept`` is the kernel's filter, ignored by older kernels, and
    ``answered`` the ports to which replies go. Raises NodeError.
    """
    if not count():
        return
    try:
        for data, at, end in dump(kept, family):
            layout = _TUPLES.get(ATTRIBUTE.unpack_from(data, at)[0])
            if layout is not None:
                _, to, number, _, port = layout.unpack_from(data, at)
                if not wanted(number, to, port):
                    continue
                source, _, _, source_port, own = layout.unpack_from(data, at + layout.size)
                if own in answered and may_be(number, to, port, source, source_port):
                    yield _connection(data, at, end)
    except OSError as error:
        raise NodeError(f"conntrack cannot be listed: {_reason(error)}") from error


def _connection(data: bytes, at: int, end: int) -> Connection:
    found = attributes(data, at, end)
    info = attributes(found.get(_PROTOINFO, b""))
    tcp = attributes(info.get(_TCP, b""))
    layout = _TUPLES[ATTRIBUTE.size + len(found[ORIGINAL])]
    protocol, original = _ends(found[ORIGINAL], layout)
    return Connection(
        protocol,
        original,
        _ends(found[REPLY], layout)[1],
        status=_integer(found, _STATUS),
        seconds=_integer(found, _TIMEOUT),
        tcp_state=_integer(tcp, _TCP_STATE),
        mark=_integer(found, _MARK),
        identity=nested(REPLY, found[REPLY])
        + b"".join(attribute(kind, found[kind]) for kind in (_ZONE, _ID) if kind in found),
    )


def _reason(error: OSError) -> str:
    """Return the error with what to do; nfnetlink answers EINVAL if ctnetlink is not registered."""
    return f"{error.strerror}{_TO_DO.get(error.errno or 0, '')}"


def _integer(attributes: Mapping[int, bytes], kind: int) -> int:
    """Return the number; 0 if there is no such attribute."""
    return int.from_bytes(attributes.get(kind, b""), "big")


def _ends(content: bytes, layout: struct.Struct) -> tuple[Protocol, Ends]:
    """Decode a tuple; a reply's tuple may be longer than the original's, by a zone at its end."""
    packed = ATTRIBUTE.pack(0, 0) + content
    source, destination, protocol, source_port, destination_port = layout.unpack_from(packed)
    ends = ip_address(source), ip_address(destination), source_port, destination_port
    return Protocol(protocol), Ends(*ends)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except OSError:
        return 0
