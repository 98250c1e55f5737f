# SPDX-License-Identifier: Apache-2.0
"""The frames that agents exchange on the segment of the uplink: beacons, ARP and NDP.

    beacon       a broadcast frame of EtherType 0x88B5, which is for local use (IEEE 802): no
                 firewall rule of a node sees it, and no router forwards it
    question     an ARP probe (RFC 5227: without an address of the sender), a neighbour solicitation
    announcement a gratuitous ARP request, an unsolicited neighbour advertisement

What is read has a bound: a flood is dropped by the kernel when a socket's buffer is full.
"""

import ctypes
import socket
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from struct import Struct, pack
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device
from ebpflb.plan.living_nodes import Beacon

ETHERTYPE = 0x88B5
_ARP_TYPE = 0x0806
_BROADCAST = b"\xff" * 6
_MAGIC, _ABLE = b"ebpflb1", 1
_DIGEST = 8  # bytes
_BEACON = Struct(f"!7sB{_DIGEST}s{_DIGEST}sB")
_ARP = Struct("!HHBBH6s4s6s4s")
_ETHERNET = 14
_REQUEST, _REPLY = 1, 2
_SOLICITATION, _ADVERTISEMENT, _OVERRIDE = 135, 136, 0x20000000
_SOURCE_MAC, _TARGET_MAC = 1, 2  # options
_NEIGHBOUR = Struct("!BBHI16sBB6s")
_HOPS = 255
_MOST = 512  # frames of a socket that are read at once
_LARGEST = 2048  # bytes
_SO_ATTACH_FILTER, _ICMP6_FILTER = 26, 1
# Classic BPF: ARP replies, and requests whose sender and target are the same (announcements).
_ARP_FILTER = (
    *((0x28, 0, 0, 20), (0x15, 4, 0, _REPLY)),  # the operation
    *((0x20, 0, 0, 28), (0x07, 0, 0, 0), (0x20, 0, 0, 38), (0x1D, 0, 1, 0)),
    *((0x06, 0, 0, 0xFFFF), (0x06, 0, 0, 0)),
)


class Answer(NamedTuple):
    """A station says that it has an address."""

    address: Address
    mac: bytes


class Segment:
    """The sockets at one device; raises OSError if it is gone."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._mac = bytes.fromhex(device.mac.replace(":", ""))
        self._joined: set[bytes] = set()  # multicast groups
        self._ndp: socket.socket | None = None
        self._beacons = self._packet_socket(ETHERTYPE)
        try:
            self._arp = self._packet_socket(_ARP_TYPE)
            _attach_filter(self._arp)
            with suppress(OSError):  # a node without IPv6
                self._ndp = self._icmp_socket()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        for each in (self._beacons, getattr(self, "_arp", None), self._ndp):
            if each:
                each.close()

    def send_beacon(self, beacon: Beacon) -> None:
        name = beacon.node.encode()
        head = _BEACON.pack(_MAGIC, beacon.able, beacon.cluster, beacon.pools, len(name))
        self._send(self._beacons, _BROADCAST + self._mac + pack("!H", ETHERTYPE) + head + name)

    def ask(self, address: Address) -> None:
        """Ask who has the address."""
        if address.version == 4:
            self._send_arp(bytes(4), address.packed)
        else:
            body = _NEIGHBOUR.pack(
                _SOLICITATION, 0, 0, 0, address.packed, _SOURCE_MAC, 1, self._mac
            )
            self._send_icmp(body, _group(address))

    def announce(self, address: Address) -> None:
        """Tell all stations that this device has the address."""
        if address.version == 4:
            self._send_arp(address.packed, address.packed)
        else:
            flags, option = _OVERRIDE, _TARGET_MAC
            body = _NEIGHBOUR.pack(
                _ADVERTISEMENT, 0, 0, flags, address.packed, option, 1, self._mac
            )
            self._send_icmp(body, IPv6Address("ff02::1").packed)

    def join(self, address: Address) -> None:
        """Let the device and switches accept solicitations for an IPv6 address."""
        if address.version == 6 and self._ndp and (group := _group(address)) not in self._joined:
            self._joined.add(group)
            member = group + pack("=I", self.device.index)
            self._ndp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)

    def take(self) -> Iterator[tuple[Beacon, bytes] | Answer]:
        """Yield what has arrived: beacons with the sender's MAC address, and answers."""
        for frame in _received(self._beacons):
            if beacon := read_beacon(frame[_ETHERNET:]):
                yield beacon, frame[6:12]
        for frame in _received(self._arp):
            if len(frame) >= _ETHERNET + _ARP.size:
                *_, operation, mac, sender, _, target = _ARP.unpack_from(frame, _ETHERNET)
                if operation == _REPLY or sender == target:
                    yield Answer(ip_address(sender), mac)
        for body in _received(self._ndp):
            if len(body) >= _NEIGHBOUR.size:
                *_, target, option, _, mac = _NEIGHBOUR.unpack_from(body)
                if option == _TARGET_MAC:
                    yield Answer(ip_address(target), mac)

    def _packet_socket(self, protocol: int) -> socket.socket:
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
        try:
            made.bind((self.device.name, protocol))
        except OSError:
            made.close()
            raise
        return made

    def _icmp_socket(self) -> socket.socket:
        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK
        made = socket.socket(socket.AF_INET6, kind, socket.IPPROTO_ICMPV6)
        blocked = [0xFFFFFFFF] * 8
        blocked[_ADVERTISEMENT // 32] &= ~(1 << _ADVERTISEMENT % 32)
        made.setsockopt(socket.IPPROTO_ICMPV6, _ICMP6_FILTER, pack("=8I", *blocked))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self.device.name.encode())
        for option, value in {
            socket.IPV6_MULTICAST_IF: self.device.index,
            socket.IPV6_MULTICAST_HOPS: _HOPS,
            socket.IPV6_MULTICAST_LOOP: 0,
        }.items():
            made.setsockopt(socket.IPPROTO_IPV6, option, value)
        return made

    def _send_arp(self, sender: bytes, target: bytes) -> None:
        body = _ARP.pack(1, 0x800, 6, 4, _REQUEST, self._mac, sender, bytes(6), target)
        self._send(self._arp, _BROADCAST + self._mac + pack("!H", _ARP_TYPE) + body)

    def _send_icmp(self, body: bytes, destination: bytes) -> None:
        if self._ndp:
            with suppress(OSError):
                self._ndp.sendto(body, (str(IPv6Address(destination)), 0, 0, self.device.index))

    def _send(self, by: socket.socket, frame: bytes) -> None:
        with suppress(OSError):  # a device that is down, or a full queue: the others hear nothing
            by.send(frame)


def read_beacon(payload: bytes) -> Beacon | None:
    """Return the beacon in a frame's payload; None if it is none of this version."""
    if len(payload) < _BEACON.size:
        return None
    magic, able, cluster, pools, length = _BEACON.unpack_from(payload)
    name = payload[_BEACON.size : _BEACON.size + length]
    if magic != _MAGIC or len(name) != length:
        return None
    return Beacon(name.decode(errors="replace"), bool(able), cluster, pools)


def _group(address: Address) -> bytes:
    """Return the group to which solicitations for an IPv6 address are sent (RFC 4291 2.7.1)."""
    return bytes.fromhex("ff0200000000000000000001ff") + address.packed[13:]


def _received(by: socket.socket | None) -> Iterator[bytes]:
    for _ in range(_MOST) if by else ():
        try:
            yield by.recv(_LARGEST)  # type: ignore[union-attr]
        except OSError:  # nothing more, or the device is down
            return


def _attach_filter(opened: socket.socket) -> None:
    """Let the kernel drop all but answers: questions may come by the thousand."""
    program = b"".join(pack("=HBBI", *line) for line in _ARP_FILTER)
    held = ctypes.create_string_buffer(program, len(program))
    header = pack("@HP", len(_ARP_FILTER), ctypes.addressof(held))
    opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)
