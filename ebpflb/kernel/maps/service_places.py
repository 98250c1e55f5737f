# SPDX-License-Identifier: Apache-2.0
"""The copies of the entries of map services in the array service_places (bpf/rules/frontend.h).

A frontend's copy is in one of the PROBES places that begin where a hash of the frontend says; if
all of them are taken, there is none.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from struct import Struct
from typing import Any

from ebpflb.entries.services import Frontend
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.bpf_map import Map, MappedArray

PROBES = 6  # SERVICE_PROBES of bpf/rules/frontend.h
_COPY = Struct("=20s4x84s20x")  # struct service_place: a frontend and a service
_KEY, _SIZE = 20, _COPY.size
_NO_KEY, _FREE = bytes(_KEY), bytes(_SIZE)
_WORDS = Struct("=4IHBx")
_V4 = (0, 0, 0xFFFF0000)  # the first words of a v4-mapped address, as programs read them
_ALL = (1 << 64) - 1
_PLACES_A_STEP = 256


class ServicePlaces:
    """The copies. Raises KernelError if a map cannot be read or written."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._services, self._secrets, opened = (
            maps[name] for name in ("services", "secret", "service_places")
        )
        assert isinstance(opened, MappedArray)
        self._map = opened
        self._forget()

    def _forget(self) -> None:
        # The keys of the copies, by place: memory that is not used yet costs nothing.
        size = _KEY * self._map.spec.entries
        self._keys = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @cached_property
    def _secret(self) -> int:
        return int(self._secrets.get(0))

    def load(self) -> None:
        """Copy the entries that map services has. Only what differs is written."""
        self._forget()
        wanted = dict(self._placed(self._services.packed_items()))
        for packed in self._map.packed_items():
            at = int.from_bytes(packed[0], "little")
            if wanted.get(at) == packed[1]:
                del wanted[at]
            else:
                wanted.setdefault(at, _FREE)
        self._map.write([*wanted.items()])

    def write(self, rows: Iterable[tuple[Frontend, Any]]) -> None:
        """Copy these entries, which map services has got."""
        self._map.write([*self._placed(self._services.packed(*row) for row in rows)])

    def remove(self, frontends: Iterable[Frontend]) -> None:
        """Remove the copies of these entries."""
        keys = map(self._services.key.pack, frontends)
        places = [at for key in keys if (at := self._find(key, key)) is not None]
        for at in places:
            self._keys[at * _KEY : (at + 1) * _KEY] = _NO_KEY
        self._map.write([(at, _FREE) for at in places])

    def wrong(self) -> Iterator[list[int]]:
        """Yield the places that differ from map services, in steps of about a millisecond."""
        for first in range(0, self._map.spec.entries, _PLACES_A_STEP):
            end = min(first + _PLACES_A_STEP, self._map.spec.entries)
            found = self._map.memory[first * _SIZE : end * _SIZE]
            copies = enumerate(Struct(f"{_SIZE}s").iter_unpack(found), first)
            yield [at for at, (copy,) in copies if copy != self._wanted(at)]

    def _wanted(self, at: int) -> bytes:
        key = self._keys[at * _KEY : (at + 1) * _KEY]
        if key == _NO_KEY:
            return _FREE
        value = bpf.map_lookup(self._services.fd, key, self._services.spec.value_size)
        return _FREE if value is None else _COPY.pack(key, value)

    def _placed(self, entries: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield the places of these packed entries, and their copies."""
        for key, value in entries:
            at = self._find(key, key)
            if at is None and (at := self._find(key, _NO_KEY)) is None:
                continue
            self._keys[at * _KEY : (at + 1) * _KEY] = key
            yield at, _COPY.pack(key, value)

    def _find(self, key: bytes, wanted: bytes) -> int | None:
        """Return the first of the key's places that has the wanted key."""
        first = first_place(key, self._secret, self._map.spec.entries)
        run = self._keys[first * _KEY : (first + PROBES) * _KEY]
        found = (at for at in range(0, len(run), _KEY) if run[at : at + _KEY] == wanted)
        return next((first + at // _KEY for at in found), None)


def unpacked(copy: bytes) -> tuple[bytes, bytes]:
    """Return the packed frontend and service of a copy."""
    frontend, service = _COPY.unpack(copy)
    return frontend, service


def first_place(key: bytes, secret: int, places: int) -> int:
    """Return a frontend's first place, as first_place of bpf/rules/frontend.h computes it."""
    *address, port, protocol = _WORDS.unpack(key)
    mixed = secret
    if tuple(address[:3]) != _V4:
        mixed = _mix(mixed, address[0] << 32 | address[1])
        mixed = _mix(mixed, address[2])
    mixed = _mix(mixed, port << 48 | protocol << 32 | address[3])
    return (mixed >> 32) * places >> 32


def _mix(mixed: int, more: int) -> int:
    """mix_step of bpf/core/tuple.h."""
    mixed = (mixed ^ more) * 0x9E3779B97F4A7C15 & _ALL
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _ALL
    return mixed ^ mixed >> 32
