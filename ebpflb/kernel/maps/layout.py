# SPDX-License-Identifier: Apache-2.0
"""Read bpf/layout.h and bpf/maps.h, so that the layout of the maps is written only once.

cffi parses the headers that layout.h includes, and a Record packs one of plan's entries into its
struct. ``__be16`` and ``__u16`` are different types, so the byte order of a field is known too. Pin
paths are named by hashes of these texts (state_dir.py).
"""

import hashlib
import re
import socket
import struct
from collections.abc import Callable
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from operator import mul
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ebpflb.kernel import declarations
from ebpflb.kernel.declarations import SOURCES as SOURCES
from ebpflb.model.addresses import Address
from ebpflb.plan import entries

_TYPES = """
typedef uint8_t __u8; typedef uint16_t __u16; typedef uint32_t __u32; typedef uint64_t __u64;
typedef struct { uint16_t wire; } __be16;
typedef struct { uint32_t wire; } __be32;
"""
MAPPED = bytes(10) + b"\xff\xff"  # RFC 4291 2.5.5.2


def _parts(header: str, folder: str, sources: Path = SOURCES) -> str:
    """Return the joined texts of the files that a header includes from a folder."""
    parts = re.findall(rf'(?m)^#include "({folder}/.+)"$', (sources / header).read_text())
    return "".join((sources / part).read_text() for part in parts)


# The maximum number of parts of a map of counters (bpf/maps.h).
COUNTER_PARTS = int(
    re.findall(r"(?m)^#define COUNTER_PARTS (\d+)$", (SOURCES / "maps.h").read_text())[0]
)
_STEPS, _EVENTS = "record/steps.h", "record/events.h"
_HEADERS = [(SOURCES / name).read_text() for name in (_STEPS, _EVENTS)]
_ALL = "".join([_TYPES, _parts("layout.h", "layout"), *_HEADERS])
TEXT = re.sub(r"(?m)^(#|SIZE\(|DEFINE_MAP\().*$", "", _ALL)  # without lines that cffi cannot parse
ffi = declarations.types(TEXT)


def names(enum: str, prefix: str) -> dict[int, str]:
    """Return the values of an enum, such as ``enum verdict``, with their names in lower case."""
    elements: dict[int, str] = ffi.typeof(f"enum {enum}").elements
    return {
        value: name.removeprefix(prefix).lower()
        for value, name in sorted(elements.items())
        if name.startswith(prefix)
    }


VERDICTS = names("verdict", "VERDICT_")
_FLAGS = {
    "struct service": names("service_flag", "SERVICE_"),
    "struct backend": names("backend_flag", "BACKEND_"),
    "struct flow": names("flow_flag", "FLOW_"),
    "struct device": names("device_flag", "DEVICE_"),
    "struct settings": names("setting_flag", "SETTING_"),
    "struct timeout_key": names("flow_flag", "FLOW_"),
}


RING = "RINGBUF"  # the kernel does not know the size of its records


class MapSpec(NamedTuple):
    """One DEFINE_MAP line: sizes in bytes, the kind and the flags by their kernel names.

    ``persistent``: an upgrade may keep the map (bpf/maps/persistent.h).
    """

    name: str
    kind: str
    key: str
    value: str
    entries: int
    flags: tuple[str, ...]
    persistent: bool = False

    @property
    def is_filled_by_programs(self) -> bool:
        return self.kind in ("HASH", "LRU_HASH") and self.flags == ("NONE",)

    def at_most(self, entries: int) -> "MapSpec":
        """Return a map of this kind with fewer entries; a ring keeps its size."""
        return self if self.kind == RING else self._replace(entries=min(self.entries, entries))

    @property
    def key_size(self) -> int:
        return 0 if self.kind == RING else _size(self.key)

    @property
    def value_size(self) -> int:
        return 0 if self.kind == RING else _size(self.value)


@cache
def _size(ctype: str) -> int:
    return int(ffi.sizeof(ctype))


def _map_specs(header: str, *, persistent: bool) -> dict[str, MapSpec]:
    lines = re.findall(r"(?m)^DEFINE_MAP\((.*)\)$", (SOURCES / header).read_text())
    parts = [[part.strip() for part in line.split(",")] for line in lines]
    return {
        name: MapSpec(
            name, kind, key, value, int(size), tuple(re.findall(r"[A-Z_]+", flags)), persistent
        )
        for name, kind, key, value, size, flags in parts
    }


_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_PERSISTENT = "maps/persistent.h"
MAPS = _map_specs(_PERSISTENT, persistent=True) | _map_specs("maps/per_version.h", persistent=False)
# For the recording and the monitoring variant of the programs: never pinned.
STEPS = _map_specs(_STEPS, persistent=False)["steps"]
MONITOR_MAPS = _map_specs(_EVENTS, persistent=False)
PROGRAM_MAPS = MAPS | {STEPS.name: STEPS} | MONITOR_MAPS  # all maps that a program may refer to


@cache
def layout_hash(sources: Path = SOURCES) -> str:
    """The name of the layout: maps of another layout are never read, except persistent ones."""
    return _hash(_parts("layout.h", "layout", sources) + _parts("maps.h", "maps", sources))


@cache
def persistent_hash(sources: Path = SOURCES) -> str:
    """The name of the layout of persistent maps, and so of the ids in them."""
    return _hash((sources / _PERSISTENT).read_text() + _parts(_PERSISTENT, "layout", sources))


def _hash(text: str) -> str:
    """Hash the C text without its comments and spaces, which no map depends on."""
    words = " ".join(_COMMENT.sub(" ", text).split())
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def address_bytes(address: Address) -> bytes:
    """Return 16 bytes in network order, IPv4 as v4-mapped IPv6."""
    return address.packed if address.version == 6 else MAPPED + address.packed


def address_from(packed: bytes) -> Address:
    """The inverse of address_bytes."""
    return IPv4Address(packed[12:]) if packed.startswith(MAPPED) else IPv6Address(packed)


def _text_bytes(text: str) -> bytes:
    return text.encode()


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


_T = TypeVar("_T", bound=tuple[Any, ...])
Convert = Callable[[Any], Any]
_CODES = {"uint8_t": "B", "uint16_t": "H", "uint32_t": "I", "uint64_t": "Q"}


def _is_not_a_column(field: str) -> bool:
    """Whether the field is padding, or the check, which a map writes (``Check``)."""
    return field.startswith("pad") or field == "check"


class Record(Generic[_T]):
    """Pack a NamedTuple into its C struct and unpack it, field by field of the same name."""

    def __init__(self, ctype: str, cls: type[_T], parts: dict[str, "Record[Any]"] | None = None):
        self.cls = cls
        self.flags = _Flags(_FLAGS.get(ctype, {}))
        self.parts = parts or {}
        fields = [(n, f) for n, f in ffi.typeof(ctype).fields]
        self.columns = [(name, *self._column(name, field.type)) for name, field in fields]
        self.struct = struct.Struct("=" + "".join(code for _, code, _, _ in self.columns))
        self.columns = [column for column in self.columns if not _is_not_a_column(column[0])]
        self.packers = [(i, to) for i, (_, _, to, _) in enumerate(self.columns) if to]
        self.unpackers = [(i, back) for i, (_, _, _, back) in enumerate(self.columns) if back]
        self._check(ctype)

    def _check(self, ctype: str) -> None:
        here: tuple[str, ...] = self.cls._fields  # type: ignore[attr-defined]
        there = tuple(name for name, *_ in self.columns)
        if here != there or self.struct.size != _size(ctype):
            raise TypeError(f"{self.cls.__name__}{here} is not {ctype}{there}")

    def _column(self, name: str, ctype: Any) -> tuple[str, Convert | None, Convert | None]:
        if _is_not_a_column(name):
            return f"{ffi.sizeof(ctype)}x", None, None
        if name == "flags" or name.endswith("_flags"):
            return _CODES[ctype.cname], self.flags.to_int, self.flags.from_int
        if name in self.parts:
            part = self.parts[name]
            return f"{part.struct.size}s", part.pack, part.unpack
        if ctype.cname == "struct address":
            return "16s", address_bytes, address_from
        if ctype.cname == "__be16":
            return "H", socket.htons, socket.ntohs
        if ctype.kind == "array":
            return f"{ctype.length}s", _text_bytes, _text_from
        return _CODES[ctype.cname], None, None

    def pack(self, value: _T) -> bytes:
        """Return the struct's bytes."""
        parts = list(value)
        for index, convert in self.packers:
            parts[index] = convert(parts[index])
        return self.struct.pack(*parts)

    def unpack(self, packed: bytes) -> _T:
        """Return the value in the struct's bytes."""
        parts = list(self.struct.unpack(packed))
        for index, convert in self.unpackers:
            parts[index] = convert(parts[index])
        return self.cls(*parts)


# The checks by which elements of maps identify their keys (bpf/core/check.h).

_NUMBERS = ffi.typeof("enum check_number").relements
_FACTOR, _FIRST = _NUMBERS["CHECK_FACTOR"], _NUMBERS["CHECK_FIRST"]


class Check:
    """The check in the packed values of one map: a sum over the key and the preceding bytes."""

    def __init__(self, spec: MapSpec, place: int) -> None:
        self.place = place
        words = (spec.key_size + place) // 4
        self._words = struct.Struct(f"={words}I")
        self._factors = [pow(_FACTOR, _FIRST + at, 2**64) for at in range(words)]

    def signed(self, key: bytes, value: bytes) -> bytes:
        """Return the value with the check of its key.

        Programs ignore a value with a wrong check.
        """
        return value[: self.place] + self._of(key, value) + value[self.place + 4 :]

    def is_right(self, key: bytes, value: bytes) -> bool:
        """Whether a program would accept this value of the key."""
        return self._of(key, value) == value[self.place : self.place + 4]

    def _of(self, key: bytes, value: bytes) -> bytes:
        words = self._words.unpack(key + value[: self.place])
        total: int = sum(map(mul, words, self._factors))
        return (total >> 32 & 0xFFFFFFFF).to_bytes(4, "little")


class NoCheck(Check):
    """For maps whose elements do not identify their keys: any value is right."""

    def __init__(self) -> None:
        pass

    def signed(self, key: bytes, value: bytes) -> bytes:
        return value

    def is_right(self, key: bytes, value: bytes) -> bool:
        return True


def check_in(spec: MapSpec) -> Check:
    """Return the check of a map's values."""
    kind = ffi.typeof(spec.value)
    fields = dict(kind.fields) if kind.kind == "struct" else {}
    return Check(spec, fields["check"].offset) if "check" in fields else NoCheck()
