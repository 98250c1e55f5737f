# SPDX-License-Identifier: Apache-2.0
"""The frames by which a node tests the legs of a hand-over, answered by bpf/path/leg_test.h.

They are ICMP of types for experiments with a TTL of 1, so no host answers them, no router forwards
them, and nobody sends an error about them.
"""

from collections.abc import Iterator
from contextlib import suppress
from struct import pack
from typing import NamedTuple

from ebpflb.kernel.segment import Frames, Program, checksum, ip_header, pseudo_header, received
from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device

_SIZES = {4: 20, 6: 40}  # of IP headers
_TYPES = {4: 0x0800, 6: 0x86DD}
_ICMP, _ICMPV6 = 1, 58
_LEG_ICMP, _LEG_ICMPV6, QUESTION, ANSWER = 253, 100, 0, 1  # leg_test.h
_ETHERNET, _MARK = 14, 8  # bytes
_LOAD_HALF, _LOAD_BYTE, _EQUAL, _RETURN = 0x28, 0x30, 0x15, 0x06
_END = ((_RETURN, 0, 0, 0xFFFF), (_RETURN, 0, 0, 0))


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
