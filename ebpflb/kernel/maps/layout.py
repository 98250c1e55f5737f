# SPDX-License-Identifier: Apache-2.0
"""Read bpf/layout.h and bpf/maps.h, so that the layout of the maps is written only once.

cffi parses the headers that layout.h includes. ``__be16`` and ``__u16`` are different types, so the
byte order of a field is known too. Pin paths are named by hashes of these texts (state_dir.py).
"""

import hashlib
import re
import struct
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from operator import mul
from pathlib import Path
from typing import NamedTuple

from ebpflb.kernel.bpf import SOURCES as SOURCES
from ebpflb.kernel.bpf import c_types
from ebpflb.model.addresses import SIZES, Address, MapSizes

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
_ANSWERED, _HANDED = "maps/answered.h", "maps/handed.h"
_HEADERS = [(SOURCES / name).read_text() for name in (_STEPS, _EVENTS, _ANSWERED, _HANDED)]
_ALL = "".join([_TYPES, _parts("layout.h", "layout"), *_HEADERS])
TEXT = re.sub(r"(?m)^(#|SIZE\(|DEFINE_MAP\().*$", "", _ALL)  # without lines that cffi cannot parse
ffi = c_types(TEXT)


def names(enum: str, prefix: str) -> dict[int, str]:
    """Return the values of an enum, such as ``enum verdict``, with their names in lower case."""
    elements: dict[int, str] = ffi.typeof(f"enum {enum}").elements
    return {
        value: name.removeprefix(prefix).lower()
        for value, name in sorted(elements.items())
        if name.startswith(prefix)
    }


VERDICTS = names("verdict", "VERDICT_")


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


def columns(ctype: str, **formats: str) -> struct.Struct:
    """Return a Struct that unpacks only these fields of a C struct, each in struct's format."""
    text, at = "=", 0
    for name, code in formats.items():
        offset = ffi.offsetof(ctype, name)
        text += f"{offset - at}x{code}"
        at = offset + struct.calcsize(f"={code}")
    return struct.Struct(f"{text}{_size(ctype) - at}x")


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
ANSWERED = _map_specs(_ANSWERED, persistent=False)["answered"]  # only with --l2-pool
HANDED = _map_specs(_HANDED, persistent=False)  # only with --hand-over
# All maps that a program may refer to.
PROGRAM_MAPS = MAPS | {STEPS.name: STEPS} | MONITOR_MAPS | {ANSWERED.name: ANSWERED} | HANDED


def usual_size(name: str) -> int:
    """Return the number of entries in maps.h; ``name`` is one of SIZES."""
    return MAPS[SIZES[name][0]].entries


def unusual(sizes: MapSizes) -> MapSizes:
    """Return the sizes that differ from maps.h."""
    return tuple((name, size) for name, size in sizes if size != usual_size(name))


def sized(sizes: MapSizes) -> dict[str, MapSpec]:
    """Return the specs of all maps, with these sizes."""
    entries = {each: size for name, size in sizes for each in SIZES[name]}
    return {
        name: spec._replace(entries=entries.get(name, spec.entries)) for name, spec in MAPS.items()
    }


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
    packed = address.packed
    return packed if len(packed) == len(MAPPED) + 4 else MAPPED + packed


def address_from(packed: bytes) -> Address:
    """The inverse of address_bytes."""
    return IPv4Address(packed[12:]) if packed.startswith(MAPPED) else IPv6Address(packed)


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
