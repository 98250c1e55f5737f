# SPDX-License-Identifier: Apache-2.0
"""What the datapath remembers of sockets (bpf/layout/socket.h), as values."""

from typing import NamedTuple

from ebpflb.datapath.maps.layout import address_from
from ebpflb.model.addresses import Address
from ebpflb.plan import entries

NO_FRONTEND = entries.Frontend(address_from(bytes(16)), 0, 0)


class Peer(NamedTuple):
    socket: int
    address: Address
    port: int


class PeerFrontend(NamedTuple):
    frontend: entries.Frontend
    backend: int
    address: Address
    port: int
    is_connected: int = 1


class SocketEntry(NamedTuple):
    """What is remembered of a socket; ``next`` has no port at the end of the list."""

    peer: PeerFrontend
    service: int
    is_shared: int = 0
    is_unlisted: int = 0
    expires: int = 0
    stream_from: int = 0
    netns: int = 0
    next: entries.Frontend = NO_FRONTEND
    counted: int = 0


class SocketsFull(NamedTuple):
    streams: int
    datagrams: int


class AssignmentKey(NamedTuple):
    socket: int
    frontend: entries.Frontend
