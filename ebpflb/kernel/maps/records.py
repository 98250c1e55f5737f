# SPDX-License-Identifier: Apache-2.0
"""The Records of all structs that are keys and values of maps, each made when it is first used.

entries/services.py defines the entries that the agent writes. This file defines those that the
programs write. A struct of which Python only reads numbers, or nothing, has no class of its own.
"""

import socket
import struct
from collections import namedtuple
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

from ebpflb.entries import services as entries
from ebpflb.entries.flows import Flow, Tuple
from ebpflb.kernel.maps.layout import address_bytes, address_from, ffi, names
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName

# What the datapath stores about sockets (bpf/layout/socket.h).

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
    """A socket's data; ``next`` has no port at the end of the list."""

    peer: PeerFrontend
    service: int
    is_shared: int = 0
    is_unlisted: int = 0
    expires: int = 0
    stream_from: int = 0
    netns: int = 0
    next: entries.Frontend = NO_FRONTEND
    counted: int = 0


class EndedSocket(NamedTuple):
    """What bpf/hooks/socket_end.c forgets: a peer of a socket, or without one the whole socket."""

    socket: int
    peer: PeerFrontend = PeerFrontend(NO_FRONTEND, 0, NO_FRONTEND.address, 0, 0)


class AffinityKey(NamedTuple):
    netns: int
    address: Address
    service: int


class Affinity(NamedTuple):
    last_used: int
    backend: int


class ServiceBackend(NamedTuple):
    service: int
    backend: int


class BackendHealth(NamedTuple):
    """``first`` to ``third``: the clients that failed, 0 if there are fewer."""

    since: int = 0
    first: int = 0
    second: int = 0
    third: int = 0
    has_opened: int = 0


class QuietSocket(NamedTuple):
    """``state`` is one of enum quiet_state; times in nanoseconds."""

    idle: int
    since: int = 0
    sent: int = 0
    received: int = 0
    state: int = 0
    ends: int = 0


class EntryEnd(IntEnum):
    """enum entry_end."""

    DELETED = 0
    RESTS = 1


class ExpiredEntry(NamedTuple):
    """An entry of a flow to end, in the frame of bpf/hooks/flow_end.c; see bpf/layout/expired.h."""

    tuple: Tuple
    time: int
    end: EntryEnd


class Sweep(NamedTuple):
    swept: int
    entries: int
    evicted: int


class MonitorEvent(NamedTuple):
    time: int
    netns: int
    took: int
    process: int
    ifindex: int
    service: int
    backend: int
    port: int
    verdict: int
    hook: int
    kind: int
    tuple: Tuple
    address: Address
    comm: str


class Monitor(NamedTuple):
    verdicts: int


class ServiceCounters(NamedTuple):
    chosen: int
    by_affinity: int
    refused: int
    no_local_endpoint: int


class BackendCounters(NamedTuple):
    opened: int
    closed: int


# Structs whose class has another name; the other classes have their struct's.
_CLASSES: dict[str, Any] = {
    "struct flow": Flow,
    "struct service": entries.ServiceEntry,
    "struct device": entries.DeviceEntry,
    "struct service_name": PortName,
    "struct event": MonitorEvent,
}


def _class(ctype: str) -> Any:
    """Return the NamedTuple of a struct, from this file or entries/services.py, or None."""
    name = "".join(word.title() for word in ctype.removeprefix("struct ").split("_"))
    return _CLASSES.get(ctype) or globals().get(name) or getattr(entries, name, None)


_FLAGS = {
    "struct service": names("service_flag", "SERVICE_"),
    "struct backend": names("backend_flag", "BACKEND_"),
    "struct flow": names("flow_flag", "FLOW_"),
    "struct device": names("device_flag", "DEVICE_"),
    "struct settings": names("setting_flag", "SETTING_"),
    "struct timeout_key": names("flow_flag", "FLOW_"),
}


_MAC_BYTES = 6


def _mac_bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def _mac_from(packed: bytes) -> str:
    return packed[:_MAC_BYTES].hex(":")


def _text_from(packed: bytes) -> str:
    return packed.split(b"\0", 1)[0].decode(errors="replace")


class _Flags:
    """Flags as words, from the header's enum, to bits and back."""

    def __init__(self, bits: dict[int, str]) -> None:
        self.bits = bits
        self.numbers = {word: bit for bit, word in bits.items()}
        self.words: dict[int, entries.Flags] = {}  # cache: bits -> words; ``sums`` is the inverse
        self.sums: dict[entries.Flags, int] = {}

    def to_int(self, words: entries.Flags) -> int:
        if words not in self.sums:
            self.sums[words] = sum(self.numbers[word] for word in words)
        return self.sums[words]

    def from_int(self, number: int) -> entries.Flags:
        if number not in self.words:
            self.words[number] = frozenset(w for bit, w in self.bits.items() if bit & number)
        return self.words[number]


class _Numbers:
    """At most ``length`` numbers, none of them 0; the rest of the array is 0."""

    def __init__(self, length: int) -> None:
        self.length, self.struct = length, struct.Struct(f"={length}I")

    def pack(self, numbers: tuple[int, ...]) -> bytes:
        return self.struct.pack(*numbers, *(0,) * (self.length - len(numbers)))

    def unpack(self, packed: bytes) -> tuple[int, ...]:
        return tuple(number for number in self.struct.unpack(packed) if number)


Convert = Callable[[Any], Any]
_CODES = {"uint8_t": "B", "uint16_t": "H", "uint32_t": "I", "uint64_t": "Q"}


def _is_not_a_column(field: str) -> bool:
    """Whether the field is padding, or the check, which a map writes (``Check``)."""
    return field.startswith("pad") or field == "check"


class Record:
    """Pack a NamedTuple into its C struct and unpack it, field by field of the same name."""

    def __init__(self, ctype: str, cls: Any = None) -> None:
        """Without ``cls`` values are tuples with the names of the fields.

        Raises TypeError if the fields of ``cls`` differ, or the compiler would pad the struct.
        """
        self.flags = _Flags(_FLAGS.get(ctype, {}))
        columns = [(name, *self._column(name, it.type)) for name, it in ffi.typeof(ctype).fields]
        self.struct = struct.Struct("=" + "".join(code for _, code, _, _ in columns))
        columns = [column for column in columns if not _is_not_a_column(column[0])]
        self.packers = [(i, to) for i, (_, _, to, _) in enumerate(columns) if to]
        self.unpackers = [(i, back) for i, (_, _, _, back) in enumerate(columns) if back]
        there = tuple(name for name, *_ in columns)
        self.cls: Any = cls
        if cls is None:
            self.cls = namedtuple(ctype.removeprefix("struct "), there)  # type: ignore[misc]
        if self.cls._fields != there or self.struct.size != ffi.sizeof(ctype):
            raise TypeError(f"{self.cls.__name__}{self.cls._fields} is not {ctype}{there}")

    def _column(self, name: str, ctype: Any) -> tuple[str, Convert | None, Convert | None]:
        if _is_not_a_column(name):
            return f"{ffi.sizeof(ctype)}x", None, None
        if name == "flags" or name.endswith("_flags"):
            return _CODES[ctype.cname], self.flags.to_int, self.flags.from_int
        if ctype.cname == "struct address":
            return "16s", address_bytes, address_from
        if ctype.cname == "__be16":
            return "H", socket.htons, socket.ntohs
        if ctype.kind == "struct":
            part = record(ctype.cname)
            return f"{part.struct.size}s", part.pack, part.unpack
        if name.endswith("mac"):
            return f"{_MAC_BYTES}s", _mac_bytes, _mac_from
        if ctype.kind == "array" and ctype.item.cname == "uint32_t":
            numbers = _Numbers(ctype.length)
            return f"{numbers.struct.size}s", numbers.pack, numbers.unpack
        if ctype.kind == "array":
            return f"{ctype.length}s", str.encode, _text_from
        return _CODES[ctype.cname], None, None

    def pack(self, value: Any) -> bytes:
        """Return the struct's bytes."""
        parts = list(value)
        for index, convert in self.packers:
            parts[index] = convert(parts[index])
        return self.struct.pack(*parts)

    def unpack(self, packed: bytes) -> Any:
        """Return the value in the struct's bytes."""
        parts = list(self.struct.unpack(packed))
        for index, convert in self.unpackers:
            parts[index] = convert(parts[index])
        return self.cls(*parts)


@cache
def record(ctype: str) -> Record:
    """Return the Record of a struct."""
    return Record(ctype, _class(ctype))


class Codec(NamedTuple):
    """Convert values of one C type to bytes and back."""

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


_NUMBER32, _NUMBER64 = struct.Struct("=I"), struct.Struct("=Q")
_PLAIN = {
    "struct steps": Codec(bytes, bytes),  # ebpflb/kernel/recording.py reads them
    "struct service_place": Codec(bytes, bytes),
    "struct address_bits": Codec(bytes, bytes),
    "struct scratch": Codec(bytes, bytes),  # the working memory of the packet programs
    "__u32": Codec(_NUMBER32.pack, lambda packed: _NUMBER32.unpack(packed)[0]),
    "__u64": Codec(_NUMBER64.pack, lambda packed: _NUMBER64.unpack(packed)[0]),
    "struct address": Codec(address_bytes, address_from),
    "struct link_address": Codec(lambda mac: _mac_bytes(mac) + bytes(2), _mac_from),
}


def codec(ctype: str) -> Codec | Record:
    """Return the codec of a map's key or value type, as maps.h names it."""
    return _PLAIN.get(ctype) or record(ctype)
