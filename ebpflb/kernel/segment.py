# SPDX-License-Identifier: Apache-2.0
"""The frames by which agents ask and tell the stations on the segment of the uplink who has what.

    question     an ARP probe (RFC 5227: without an address of the sender), a neighbour solicitation
    announcement a gratuitous ARP request, an unsolicited neighbour advertisement

What is read has a bound: classic BPF lets only answers pass, and a flood of them is dropped by the
kernel when a socket's buffer is full. An advertisement counts only if no router has forwarded it.
"""

import ctypes
import fcntl
import socket
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from struct import Struct, iter_unpack, pack
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device
from ebpflb.model.pools import PROBED

_ARP_TYPE, _IPV4_TYPE, _IPV6_TYPE = 0x0806, 0x0800, 0x86DD
_BROADCAST = b"\xff" * 6
_ALL_NODES = ip_address("ff02::1")
_ARP = Struct("!HHBBH6s4s6s4s")
_ETHERNET, _IPV6 = 14, 40
_REQUEST, _REPLY = 1, 2
_ICMPV6, _HOPS = 58, 255
_SOLICITATION, _ADVERTISEMENT, _OVERRIDE = 135, 136, 0x20000000
_SOURCE_MAC, _TARGET_MAC = 1, 2  # options
_NEIGHBOUR = Struct("!BBHI16sBB6s")
_MOST = 512  # frames of a socket that are read at once
_LARGEST = 2048  # bytes
_SO_ATTACH_FILTER = 26
_ADD_MULTICAST = 0x8931  # SIOCADDMULTI
_GROUPS_OF_SOCKET = 100  # net.core.optmem_max allows some 400
Program = tuple[tuple[int, int, int, int], ...]
# Classic BPF: code, jumps if true and if false, number. Loads of 4, 2 and 1 bytes; the last two
# lines of each let the frame pass, or drop it.
_LOAD, _LOAD_HALF, _LOAD_BYTE, _TO_X, _AND = 0x20, 0x28, 0x30, 0x07, 0x54
_EQUAL, _EQUAL_X, _RETURN = 0x15, 0x1D, 0x06
_END = ((_RETURN, 0, 0, 0xFFFF), (_RETURN, 0, 0, 0))
# ARP replies, and requests whose sender and target are the same (announcements).
_ARP_ANSWERS = (
    *((_LOAD_HALF, 0, 0, 20), (_EQUAL, 4, 0, _REPLY)),
    *((_LOAD, 0, 0, 28), (_TO_X, 0, 0, 0), (_LOAD, 0, 0, 38), (_EQUAL_X, 0, 1, 0)),
    *_END,
)
# Those for the addresses by which nodes are probed: no flood of others hides them.
_PROBE_ANSWERS = (
    *((_LOAD_HALF, 0, 0, 20), (_EQUAL, 0, 3, _REPLY)),
    *((_LOAD, 0, 0, 28), (_AND, 0, 0, 0xF0000000), (_EQUAL, 0, 1, int(PROBED[0]))),
    *_END,
)
_ADVERTISEMENTS = (
    *((_LOAD_HALF, 0, 0, 20), (_EQUAL, 0, 3, _ICMPV6 << 8 | _HOPS)),
    *((_LOAD_BYTE, 0, 0, 54), (_EQUAL, 0, 1, _ADVERTISEMENT)),
    *_END,
)


class Answer(NamedTuple):
    """A station says that it has an address."""

    address: Address
    mac: bytes


class Frames:
    """Sockets for frames at one device, each with the protocol of its frames, and those that it
    gets, from the first on; raises OSError if the device is gone.
    """

    def __init__(self, device: Device, *wanted: tuple[int, Program]) -> None:
        self.device = device
        self.mac = bytes.fromhex(device.mac.replace(":", ""))
        self._opened: list[socket.socket] = []
        try:
            for protocol, program in wanted:
                made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
                self._opened.append(made)
                _attach_filter(made, program)
                made.bind((device.name, protocol))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        for each in self._opened:
            each.close()


class Segment(Frames):
    """Questions and announcements, and their answers."""

    def __init__(self, device: Device) -> None:
        super().__init__(
            device,
            (_ARP_TYPE, _ARP_ANSWERS),
            (_ARP_TYPE, _PROBE_ANSWERS),
            (_IPV6_TYPE, _ADVERTISEMENTS),
        )
        self._arp, self._probes, self._ndp = self._opened
        self._joined: set[bytes] = set()  # multicast groups

    def ask(self, address: Address, mac: bytes = _BROADCAST) -> None:
        """Ask all stations, or the one with this MAC address, who has the address."""
        if address.version == 4:
            self._send_arp(bytes(4), address.packed, mac)
        else:
            self._send_ndp(_SOLICITATION, 0, address, _SOURCE_MAC, _group(address))

    def announce(self, address: Address) -> None:
        """Tell all stations that this device has the address."""
        if address.version == 4:
            self._send_arp(address.packed, address.packed, _BROADCAST)
        else:
            self._send_ndp(_ADVERTISEMENT, _OVERRIDE, address, _TARGET_MAC, _ALL_NODES.packed)

    def join(self, address: Address) -> None:
        """Let the device, and switches, take solicitations for an IPv6 address.

        The device's own filter keeps the group without an agent, too, until the device goes.
        """
        if address.version == 4 or (group := _group(address)) in self._joined:
            return
        self._joined.add(group)
        name, mac = self.device.name.encode(), b"\x33\x33" + group[12:]
        with suppress(OSError):  # the filter has it
            fcntl.ioctl(self._arp, _ADD_MULTICAST, pack("=16sH6s16x", name, 0, mac))
        if len(self._joined) % _GROUPS_OF_SOCKET == 1:
            with suppress(OSError):  # a node without IPv6
                self._opened.append(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        with suppress(OSError):
            member = group + pack("=I", self.device.index)
            self._opened[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)

    def take(self) -> Iterator[Answer]:
        """Yield what has arrived, the answers to probes of nodes first."""
        for opened in (self._probes, self._arp):
            for frame in received(opened):
                if len(frame) >= _ETHERNET + _ARP.size:
                    *_, mac, sender, _, _ = _ARP.unpack_from(frame, _ETHERNET)
                    yield Answer(ip_address(sender), mac)
        for frame in received(self._ndp):
            if len(frame) >= _ETHERNET + _IPV6 + _NEIGHBOUR.size:
                *_, target, option, _, mac = _NEIGHBOUR.unpack_from(frame, _ETHERNET + _IPV6)
                if option == _TARGET_MAC:
                    yield Answer(ip_address(target), mac)

    def _send_arp(self, sender: bytes, target: bytes, to: bytes) -> None:
        body = _ARP.pack(1, 0x800, 6, 4, _REQUEST, self.mac, sender, bytes(6), target)
        self._send(self._arp, to + self.mac + pack("!H", _ARP_TYPE) + body)

    def _send_ndp(self, kind: int, flags: int, target: Address, option: int, to: bytes) -> None:
        """Send from the device's link-local address; without one the node has no IPv6."""
        local = (it for it in self.device.addresses if it.version == 6 and it.is_link_local)
        if (address := next(local, None)) is None:
            return
        group, size = ip_address(to), _NEIGHBOUR.size
        fields = kind, 0, 0, flags, target.packed, option, 1, self.mac
        pseudo = pseudo_header(address, group, _ICMPV6, size)
        total = checksum(pseudo + _NEIGHBOUR.pack(*fields))
        body = _NEIGHBOUR.pack(kind, 0, total, *fields[3:])
        header = ip_header(address, group, _ICMPV6, size, _HOPS)
        self._send(self._ndp, b"\x33\x33" + to[12:] + self.mac + header + body)

    def _send(self, by: socket.socket, frame: bytes) -> None:
        with suppress(OSError):  # a device that is down, or a full queue: the others hear nothing
            by.send(frame)


def checksum(data: bytes) -> int:
    """Return the checksum of RFC 1071; an odd last byte counts as if a zero followed."""
    total: int = sum(word for (word,) in iter_unpack("!H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def pseudo_header(source: Address, to: Address, protocol: int, length: int) -> bytes:
    """Return what the checksum of ``length`` bytes of payload covers beside them."""
    return source.packed + to.packed + pack("!II", length, protocol)


def ip_header(source: Address, to: Address, protocol: int, length: int, hops: int = 64) -> bytes:
    """Return the EtherType and the IP header of a packet with ``length`` bytes of payload."""
    ends = source.packed + to.packed
    if to.version == 6:
        return pack("!HIHBB", _IPV6_TYPE, 6 << 28, length, protocol, hops) + ends
    header = pack("!BBHHHBBH", 0x45, 0, 20 + length, 0, 0, hops, protocol, 0) + ends
    return pack("!H", _IPV4_TYPE) + header[:10] + pack("!H", checksum(header)) + header[12:]


def _group(address: Address) -> bytes:
    """Return the group to which solicitations for an IPv6 address are sent (RFC 4291 2.7.1)."""
    return bytes.fromhex("ff0200000000000000000001ff") + address.packed[13:]


def received(by: socket.socket) -> Iterator[bytes]:
    """Yield the frames that wait, up to a bound."""
    for _ in range(_MOST):
        try:
            yield by.recv(_LARGEST)
        except OSError:  # nothing more, or the device is down
            return


def _attach_filter(opened: socket.socket, wanted: Program) -> None:
    """Let the kernel drop all other frames: questions may come by the thousand."""
    program = b"".join(pack("=HBBI", *line) for line in wanted)
    held = ctypes.create_string_buffer(program, len(program))
    header = pack("@HP", len(wanted), ctypes.addressof(held))
    opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)


# The frames by which a node tests the legs of a hand-over, answered by bpf/path/leg_test.h.
#
# They are ICMP of types for experiments with a TTL of 1, so no host answers them, no router
# forwards them, and nobody sends an error about them.

_SIZES = {4: 20, 6: 40}  # of IP headers
_TYPES = {4: _IPV4_TYPE, 6: _IPV6_TYPE}
_ICMP = 1
_LEG_ICMP, _LEG_ICMPV6, QUESTION, ANSWER = 253, 100, 0, 1  # leg_test.h
_MARK = 8  # bytes


def _answers(protocol_at: int, protocol: int, icmp_at: int, kind: int) -> Program:
    """Return classic BPF that lets only answers pass."""
    return (
        *((_LOAD_BYTE, 0, 0, protocol_at), (_EQUAL, 0, 3, protocol)),
        *((_LOAD_HALF, 0, 0, icmp_at), (_EQUAL, 0, 1, kind << 8 | ANSWER)),
        *_END,
    )


_FILTERS = {
    4: _answers(23, _ICMP, _ETHERNET + _SIZES[4], _LEG_ICMP),
    6: _answers(20, _ICMPV6, _ETHERNET + _SIZES[6], _LEG_ICMPV6),
}


class LegAnswer(NamedTuple):
    """What came back from the station with this MAC address; ``mark``: of the question."""

    mac: bytes
    mark: bytes


class LegTest(Frames):
    """As long as a test lasts."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, *((kind, _FILTERS[version]) for version, kind in _TYPES.items()))
        self._of = dict(zip(_TYPES, self._opened, strict=True))

    def ask(self, to: bytes, source: Address, destination: Address, mark: bytes) -> None:
        """Send a question to a MAC address; ``mark``: 8 bytes that the answer has too."""
        frame = question(to, self.mac, source, destination, mark)
        with suppress(OSError):  # the device is down, or its queue is full: no answer comes
            self._of[source.version].send(frame)

    def take(self) -> Iterator[LegAnswer]:
        """Yield the answers that have arrived."""
        for version, opened in self._of.items():
            at = _ETHERNET + _SIZES[version] + 4
            for frame in received(opened):
                if len(mark := frame[at : at + _MARK]) == _MARK:
                    yield LegAnswer(frame[6:12], mark)


def question(to: bytes, by: bytes, source: Address, destination: Address, mark: bytes) -> bytes:
    """Return the frame between two MAC addresses."""
    protocol, kind, pseudo = _ICMP, _LEG_ICMP, b""
    size = 4 + len(mark)
    if source.version == 6:
        protocol, kind = _ICMPV6, _LEG_ICMPV6
        pseudo = pseudo_header(source, destination, protocol, size)
    icmp = pack("!BB", kind, QUESTION)
    total = checksum(pseudo + icmp + bytes(2) + mark)
    header = ip_header(source, destination, protocol, size, 1)
    return to + by + header + icmp + pack("!H", total) + mark
