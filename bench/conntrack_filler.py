# SPDX-License-Identifier: Apache-2.0
"""Adds entries to the conntrack of this network namespace by netlink, and removes them.

nf_conntrack_max cannot be lowered for one namespace, but each may have as many as it says.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from pyroute2 import netns

from ebpflb.entries.flows import SEEN_REPLY, Ends
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.netfilter.conntrack import ORIGINAL, REPLY, TuplePart
from ebpflb.kernel.netlink import ACK, REQUEST, attribute, nested
from ebpflb.lab.hosts import Host
from ebpflb.model.addresses import Address

_CREATE, _EXCLUSIVE = 0x400, 0x200  # NLM_F_*
_STATUS, _SOURCE_NAT, _TIMEOUT, _DESTINATION_NAT = 3, 6, 7, 13  # CTA_*
_PORTS = 3  # CTA_NAT_PROTO
_ASSURED, _CONFIRMED = 1 << 2, 1 << 3  # enum ip_conntrack_status
_FIRST_SOURCES = {4: ip_address("10.128.0.0"), 6: ip_address("fd80::")}
_PORT = 1000
_SECONDS = 600
_AT_ONCE = 200
_LIMIT = Path("/proc/sys/net/netfilter/nf_conntrack_max")
_FREE = 10_000  # entries


class Served(NamedTuple):
    """The address and port of a Service's frontend, and of one of its endpoints."""

    frontend: tuple[Address, int]
    endpoint: tuple[Address, int]


@contextmanager
def room_for(entries: int) -> Iterator[None]:
    """Raise conntrack's limit to this many entries and some more, until the block ends."""
    usual = _LIMIT.read_text()
    _LIMIT.write_text(str(max(int(usual), entries + _FREE)))
    try:
        yield
    finally:
        _LIMIT.write_text(usual)


@contextmanager
def full(node: Host, *, free: int = 0) -> Iterator[None]:
    """Fill the node's conntrack with connections, except for ``free`` entries."""
    with entered(node):
        count = conntrack.limit() - conntrack.count() - free
    with amid(node, count):
        yield


@contextmanager
def amid(node: Host, count: int, served: Served | None = None) -> Iterator[None]:
    """Add this many entries to the node's conntrack (see ``fill``); empty it afterwards."""
    try:
        with entered(node):
            fill(range(count), served)
        yield
    finally:
        with entered(node):
            empty()


@contextmanager
def entered(node: Host) -> Iterator[None]:
    """Enter the node's network namespace with this thread."""
    netns.pushns(node.netns)
    try:
        yield
    finally:
        netns.popns()


def fill(numbers: range, served: Served | None = None) -> None:
    """Add an entry of UDP for each number, from an address of its own.

    They lead to nowhere, or through a Service to an endpoint. The kernel gives none of them up for
    new ones. Raises OSError.
    """
    status = SEEN_REPLY | _ASSURED | _CONFIRMED
    rest = attribute(_STATUS, struct.pack(">I", status))
    destination, port = served.frontend if served else (ip_address("10.192.0.0"), _PORT)
    if served:
        rest += _nat_to(served.endpoint)
    first_source = _FIRST_SOURCES[destination.version]
    ends = Ends(first_source, destination, _PORT, port)
    around_source = _entry(socket.IPPROTO_UDP, ends, rest).split(first_source.packed)
    with conntrack.open_ctnetlink() as kernel:
        for first in range(0, len(numbers), _AT_ONCE):
            sources = (first_source + it for it in numbers[first : first + _AT_ONCE])
            kernel.send(b"".join(source.packed.join(around_source) for source in sources))


def forge(
    protocol: int, ends: Ends, to: tuple[Address, int], source: Address | None = None
) -> None:
    """Add an entry whose requests go to another destination, from ``source`` if it is given.

    Nothing has been sent yet. Raises OSError.
    """
    rest = _nat_to(to)
    if source:
        rest += nested(_SOURCE_NAT, _nat_address(source))
    with conntrack.open_ctnetlink() as kernel:
        (result,) = conntrack.asked(kernel, [_entry(protocol, ends, rest, ACK)])
    if result:
        raise OSError(result, "conntrack takes no entry")


def _nat_to(endpoint: tuple[Address, int]) -> bytes:
    address, port = endpoint
    ports = nested(_PORTS, attribute(1, struct.pack(">H", port)))  # CTA_PROTONAT_PORT_MIN
    return nested(_DESTINATION_NAT, _nat_address(address) + ports)


def _nat_address(address: Address) -> bytes:
    """CTA_NAT_V4_MINIP or CTA_NAT_V6_MINIP."""
    return attribute(1 if address.version == 4 else 4, address.packed)


def _entry(protocol: int, ends: Ends, rest: bytes, flags: int = 0) -> bytes:
    source, destination, source_port, destination_port = ends
    reply = Ends(destination, source, destination_port, source_port)
    tuples = nested(ORIGINAL, TuplePart(protocol, *ends).content)
    tuples += nested(REPLY, TuplePart(protocol, *reply).content)
    timeout = attribute(_TIMEOUT, struct.pack(">I", _SECONDS))
    return conntrack.request(
        conntrack.NEW,
        REQUEST | _CREATE | _EXCLUSIVE | flags,
        tuples + timeout + rest,
        conntrack.family(source),
    )


def empty() -> None:
    """Delete all entries. Raises OSError."""
    with conntrack.open_ctnetlink() as kernel:
        conntrack.asked(kernel, [conntrack.request(conntrack.DELETE, REQUEST | ACK, b"")])
