# SPDX-License-Identifier: Apache-2.0
"""What conntrack tells listeners (`conntrack -E`) of the flows of a node."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from socket import socket
from typing import NamedTuple

from ebpflb.entries.flows import Ends
from ebpflb.kernel.netfilter import conntrack as messages
from ebpflb.kernel.netlink import attributes, split
from ebpflb.lab.hosts import Host
from tests.kernel.node import nodes

_GROUPS = 0b111  # NF_NETLINK_CONNTRACK_NEW, _UPDATE, _DESTROY (nfnetlink_compat.h)
_CREATE = 0x400  # NLM_F_CREATE
_ORIGINAL, _REPLY, _IP, _PROTO = 1, 2, 1, 2  # CTA_TUPLE_ORIG, _REPLY, CTA_TUPLE_IP, _PROTO


class Event(NamedTuple):
    """``kind`` is "new", "update" or "destroy"."""

    kind: str
    original: Ends
    reply: Ends


class Listener:
    """Listens from its creation on, in the network namespace of the thread."""

    def __init__(self) -> None:
        self._kernel = messages.open_ctnetlink()
        self._kernel.bind((0, _GROUPS))
        self._kernel.setblocking(False)

    def events(self) -> list[Event]:
        """All events since the last call. What a finished call has caused has been told."""
        found: list[Event] = []
        with suppress(BlockingIOError):
            while True:
                found += _events(self._kernel)
        return found

    def close(self) -> None:
        self._kernel.close()


@contextmanager
def listening(node: Host) -> Iterator[Listener]:
    with nodes.entered(node.netns):
        listener = Listener()
    try:
        yield listener
    finally:
        listener.close()


def _events(kernel: socket) -> Iterator[Event]:
    data = kernel.recv(messages.BUFFER_SIZE)
    for kind, flags, _, begin, end in split(data):
        name = "destroy" if kind == messages.DELETE else "new" if flags & _CREATE else "update"
        found = attributes(data, begin + messages.FAMILY.size, end)
        original, reply = (_ends(found[direction]) for direction in (_ORIGINAL, _REPLY))
        if original and reply:
            yield Event(name, original, reply)


def _ends(tuple_: bytes) -> Ends | None:
    """None where the protocol has no ports."""
    parts = attributes(tuple_)
    addresses, ports = attributes(parts[_IP]), attributes(parts[_PROTO])
    if 2 not in ports:
        return None
    source, destination = (ip_address(address) for _, address in sorted(addresses.items()))
    return Ends(source, destination, *(int.from_bytes(ports[kind], "big") for kind in (2, 3)))
