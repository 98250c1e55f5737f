# SPDX-License-Identifier: Apache-2.0
"""The sockets by which nodes are probed, and by which agents ask each other about nodes.

A SYN is sent by a socket whose filter drops all segments that come, and counts them: so the kernel
of the other node has answered, and no connection is opened. The kubelet would log each one.
"""

import ctypes
import secrets
import socket
import struct
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ebpflb.kernel.checksum import internet_checksum

KUBELET_PORT = 10250
MOST_SYNS, SYN_SECONDS = 256, 1.0  # that wait for an answer; for so long, without a second SYN

_SOL_RAW, _ICMP_FILTER, _ICMP6_FILTER = 255, 1, 1  # linux/socket.h, icmp.h, icmpv6.h
_LARGEST = 256  # bytes that are read of a packet: what is longer is no answer to us
_MOST_ECHOES = 4096  # read at a time
_MAGIC = b"ebpf"
_BODY = struct.Struct("!BBHHH4sQ")  # type, code, checksum, identifier, sequence; magic, token
_SO_ATTACH_FILTER, _SO_MEMINFO = 26, 55  # asm-generic/socket.h
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # linux/filter.h: BPF_RET | BPF_K, of 0 bytes
_MEMINFO = struct.Struct("=9I")  # linux/sock_diag.h; the last number is SK_MEMINFO_DROPS
_IPV4_WORDS = 0x0F  # of its first byte: the header's length in words of four bytes


class _Types(NamedTuple):
    """The numbers of echo messages."""

    request: int
    reply: int


_TYPES = {socket.AF_INET: _Types(8, 0), socket.AF_INET6: _Types(128, 129)}


class _Syn(NamedTuple):
    """One that waits for an answer."""

    sender: socket.socket
    address: str
    token: int
    sent: float


class NodeSockets:
    """Sockets at this node's address: for echo messages, for datagrams at a UDP port, and for SYNs.

    Nothing blocks; what cannot be sent is lost, as it might be on the way. Raises OSError.
    """

    def __init__(self, own: str, port: int) -> None:
        self._family = socket.AF_INET6 if ":" in own else socket.AF_INET
        self._own, self._types, self._port = own, _TYPES[self._family], port
        self._syns: deque[_Syn] = deque()
        self._id = secrets.randbits(16)  # for a raw socket; others have the kernel's
        with ExitStack() as stack:
            self.echo = stack.enter_context(self._open_echo())
            self.mail = stack.enter_context(socket.socket(self._family, socket.SOCK_DGRAM))
            for each, its in ((self.echo, 0), (self.mail, port)):
                each.setblocking(False)
                each.bind((own, its))
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._give_up_syns(0)
        self._stack.close()

    def probe(self, address: str, token: int) -> None:
        """Send an echo request."""
        sequence = token & 0xFFFF
        head = (self._types.request, 0), (self._id, sequence, _MAGIC, token)
        packet = _BODY.pack(*head[0], 0, *head[1])
        if self._family == socket.AF_INET:
            packet = _BODY.pack(*head[0], internet_checksum(packet), *head[1])
        with suppress(OSError):
            self.echo.sendto(packet, (address, 0))

    def send(self, address: str, datagram: bytes) -> None:
        with suppress(OSError):
            self.mail.sendto(datagram, (address, self._port))

    def replies(self) -> list[tuple[str, int]]:
        """Return the senders and tokens of the echo replies that have come."""
        found = []
        for packet, address in _read(self.echo, _MOST_ECHOES):
            message = packet[self._header(packet) :]
            if len(message) == _BODY.size:
                kind, code, _, _, _, magic, token = _BODY.unpack(message)
                if (kind, code, magic) == (self._types.reply, 0, _MAGIC):
                    found.append((address, token))
        return found

    def send_syn(self, address: str, token: int) -> None:
        """Send a SYN to the kubelet's port."""
        self._give_up_syns(MOST_SYNS - 1)
        with suppress(OSError):
            sender = socket.socket(self._family, socket.SOCK_STREAM)
            self._syns.append(_Syn(sender, address, token, time.monotonic()))
            _drop_all(sender)
            sender.setblocking(False)
            sender.bind((self._own, 0))
            sender.connect((address, KUBELET_PORT))

    def syn_answers(self) -> list[tuple[str, int]]:
        """Return whose kernels have answered a SYN, by SYN-ACK or RST, and its token."""
        answered = [each for each in self._syns if _dropped(each.sender)]
        for each in answered:
            self._syns.remove(each)
            each.sender.close()
        self._give_up_syns(MOST_SYNS)
        return [(each.address, each.token) for each in answered]

    def _give_up_syns(self, most: int) -> None:
        """Forget the oldest: all but ``most``, and those that have waited long enough."""
        late = time.monotonic() - SYN_SECONDS
        while len(self._syns) > most or (self._syns and self._syns[0].sent < late):
            self._syns.popleft().sender.close()

    def datagrams(self, most: int) -> list[tuple[bytes, str]]:
        """Return datagrams that have come, with their senders' addresses."""
        return _read(self.mail, most)

    def _open_echo(self) -> socket.socket:
        """Return a socket for echo messages; a raw one where the kernel grants no other (ping(8)).

        net.ipv4.ping_group_range says to which groups it does; a raw one needs CAP_NET_RAW.
        """
        is_v4 = self._family == socket.AF_INET
        protocol = socket.IPPROTO_ICMP if is_v4 else socket.IPPROTO_ICMPV6
        with suppress(PermissionError):
            return socket.socket(self._family, socket.SOCK_DGRAM, protocol)
        found = socket.socket(self._family, socket.SOCK_RAW, protocol)
        if is_v4:
            blocked = struct.pack("=I", 0xFFFFFFFF & ~(1 << self._types.reply))
            found.setsockopt(_SOL_RAW, _ICMP_FILTER, blocked)
        else:
            words = [0xFFFFFFFF] * 8
            words[self._types.reply // 32] &= ~(1 << self._types.reply % 32)
            found.setsockopt(socket.IPPROTO_ICMPV6, _ICMP6_FILTER, struct.pack("=8I", *words))
        return found

    def _header(self, packet: bytes) -> int:
        """Return the length of the IP header: raw sockets of IPv4 get one."""
        if self._family == socket.AF_INET6 or self.echo.type != socket.SOCK_RAW or not packet:
            return 0
        return 4 * (packet[0] & _IPV4_WORDS)


def _read(source: socket.socket, most: int) -> list[tuple[bytes, str]]:
    found: list[tuple[bytes, str]] = []
    with suppress(OSError):  # nothing more to read
        while len(found) < most:
            packet, (address, *_) = source.recvfrom(_LARGEST)
            found.append((packet, address))
    return found


def _drop_all(receiver: socket.socket) -> None:
    """Have the kernel drop all segments for this socket."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    described = struct.pack("HL", 1, ctypes.addressof(program))  # struct sock_fprog
    receiver.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


def _dropped(receiver: socket.socket) -> int:
    """Return the number of packets that were dropped at this socket."""
    read = receiver.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
    return int(_MEMINFO.unpack(read)[-1])
