# SPDX-License-Identifier: Apache-2.0
"""What is read from maps in large parts: frontends, endpoints, sockets, and ring buffers.

Very many connections are looked up among the frontends: the map's keys are read once and not
unpacked, 65,536 of them in 0.1 s.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from struct import pack
from typing import Any

from ebpflb.kernel.maps.bpf_map import Map, Slices, pairs
from ebpflb.kernel.maps.layout import MAPPED, MAPS, columns, ffi
from ebpflb.kernel.maps.records import SocketEntry
from ebpflb.model.addresses import Address

_AT = {name: ffi.offsetof("struct frontend", name) for name in ("address", "port", "protocol")}
_SIZE = MAPS["services"].key_size
_KEY = struct.Struct(f">16sHB{_SIZE - _AT['protocol'] - 1}x")
assert _AT == {"address": 0, "port": 16, "protocol": 18}, "struct frontend is read in this order"
_ANY = {4: bytes(4), 16: bytes(16)}  # a NodePort's address, by the length of a packed one


class FrontendKeys:
    """The frontends at the time of the first use."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._maps = maps

    def __call__(self, protocol: int, address: bytes, port: int) -> bool:
        """Whether this is a frontend: of a service, or a NodePort at an address of the node.

        ``address`` is packed, in 4 or 16 bytes.
        """
        if (protocol, address, port) in self._keys:
            return True
        nodeport = protocol, _ANY[len(address)], port
        return nodeport in self._keys and address in self._node_addresses

    @cached_property
    def _keys(self) -> set[tuple[int, bytes, int]]:
        return {
            (protocol, _short(address), port)
            for keys, _ in self._maps["services"].slices()
            for address, port, protocol in _KEY.iter_unpack(keys)
        }

    @cached_property
    def _node_addresses(self) -> set[bytes]:
        return {address.packed for address, _ in self._maps["node_addresses"].items()}


def _short(address: bytes) -> bytes:
    """Return an IPv4 address in four bytes; the maps hold it as v4-mapped IPv6."""
    return address[len(MAPPED) :] if address.startswith(MAPPED) else address


# The endpoint of each backend id in the maps; netfilter translates to it.


_SLOT = columns("struct backend", address="16s", port="2s", id="I")
_U32 = struct.Struct("=I")


class Translations(Mapping[int, tuple[Address, int]]):
    """Backend id -> address and port, read on each access. Safe in any thread."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._backend_slots, self._slots = maps["backend_slots"], maps["slots"]

    def __getitem__(self, id: int) -> tuple[Address, int]:
        if not 0 < id < self._backend_slots.spec.entries:
            raise KeyError(id)
        slot = self._backend_slots.get(id)
        backend = self._slots.get(slot) if slot < self._slots.spec.entries else None
        if backend is None or backend.id != id:
            raise KeyError(id)
        return backend.address, backend.port

    def __iter__(self) -> Iterator[int]:
        return (id for id, _ in self.packed())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def packed(self) -> Iterator[tuple[int, bytes]]:
        """Yield each id with its endpoint in netfilter's format, ten times faster than unpacking.

        The format: the address in 4 or 16 bytes, the port in two, and two more.
        """
        entries = self._backend_slots.spec.entries
        slot_of = self._backend_slots.get_range(0, entries)
        for keys, values in self._slots.slices():
            slots = zip(_U32.iter_unpack(keys), _SLOT.iter_unpack(values), strict=True)
            for (slot,), (address, port, id) in slots:
                if 0 < id < entries and slot_of[id] == slot:
                    yield id, address.removeprefix(MAPPED) + port + bytes(2)


# What the programs remember of sockets, by cookie: one view of two maps.
#
# A socket's entry is in the array socket_places, at its cookie modulo the number of places, or in
# the hash sockets if another open socket has that place (bpf/sockets/place.h). While an entry is
# read its place may go to another socket: then the entry of a socket that was just released is
# wrong, and no longer matters.


_ENTRY_SIZE = MAPS["sockets"].value_size
_PLACE = columns("struct socket_place", socket="Q", entry=f"{_ENTRY_SIZE}s")
_COOKIES = 0, 3  # the highest bits of a cookie: others claim a place (PLACE_CLAIMED)
_FEW_ARE_TAKEN = 8  # places that are read for each entry of a slice
_SLICE = 512  # sockets: the places that are read for them stay in a CPU's cache


class RememberedSockets:
    """The remembered sockets; only the programs write them."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._places, self._others = maps["socket_places"], maps["sockets"]

    def get(self, cookie: int) -> SocketEntry | None:
        """Return a socket's entry, or None for an unknown socket. Raises KernelError."""
        place = self._places.get(cookie % MAPS["socket_places"].entries)
        if place and place.socket == cookie:
            found: SocketEntry = place.entry
            return found
        other: SocketEntry | None = self._others.get(cookie)
        return other

    def slices(self, size: int = _SLICE) -> Slices:
        """Yield the cookies of up to ``size`` sockets, joined, and their packed entries.

        Raises KernelError.
        """
        for _, places in self._places.slices(size * _FEW_ARE_TAKEN):
            if places != bytes(len(places)):  # most slices of a quiet node are empty
                found = ((it, entry) for it, entry in _PLACE.iter_unpack(places) if it)
                taken = [each for each in found if each[0] >> 62 in _COOKIES]
                for at in range(0, len(taken), size):
                    part = taken[at : at + size]
                    cookies = pack(f"={len(part)}Q", *(cookie for cookie, _ in part))
                    yield cookies, b"".join([entry for _, entry in part])
        yield from self._others.slices(size)

    def packed_items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield cookie and entry of each socket, as the hash holds them. Raises KernelError."""
        for cookies, entries in self.slices():
            yield from pairs(self._others.spec, cookies, entries)

    def items(self) -> Iterator[tuple[int, SocketEntry]]:
        """Yield cookie and entry of each socket. Raises KernelError."""
        for cookie, entry in self.packed_items():
            yield self._others.key.unpack(cookie), self._others.value.unpack(entry)


# A ring buffer of the kernel (Documentation/bpf/ringbuf.rst) whose records have one size.
#
# The pages of its descriptor are: the reader's position, the writers' position, then the data
# twice, so that a record that wraps around the end is contiguous too. A record has a header of
# eight bytes, whose first word is its length, with a bit that is set while the record is being
# written.


HEADER = 8
_BUSY = 1 << 31  # BPF_RINGBUF_BUSY_BIT
_WORD = 4
_POSITION = struct.Struct("=Q")


class Ring:
    """A reader, for one thread."""

    def __init__(self, opened: Map) -> None:
        """Raises OSError."""
        self._record, self._unpack = ffi.sizeof(opened.spec.value), opened.value.unpack
        self.stride = HEADER + -(-self._record // 8) * 8
        self._fd, self._size = opened.fd, opened.spec.entries
        self._reader = mmap.mmap(opened.fd, mmap.PAGESIZE)
        pages = mmap.PAGESIZE + 2 * self._size
        self._data = mmap.mmap(
            opened.fd, pages, mmap.MAP_SHARED, mmap.PROT_READ, offset=mmap.PAGESIZE
        )
        self._words = memoryview(self._data).cast("I")

    def fileno(self) -> int:
        """Return the descriptor, which is readable when there are records."""
        return self._fd

    def take(self) -> bytes:
        """Return all complete records in order, each with its header.

        The headers are read before their records.
        """
        begin = _POSITION.unpack_from(self._reader)[0]
        end = _POSITION.unpack_from(self._data)[0]
        if begin == end:
            return b""
        at = mmap.PAGESIZE + begin % self._size
        headers = self._words[at // _WORD : (at + end - begin) // _WORD : self.stride // _WORD]
        count = next((i for i, word in enumerate(headers) if word & _BUSY), len(headers))
        taken = self._data[at : at + count * self.stride]
        self._reader[: _POSITION.size] = _POSITION.pack(begin + count * self.stride)
        return taken

    def take_values(self) -> list[Any]:
        """Return all complete records in order, as values of the map's type."""
        taken = self.take()
        begins = range(HEADER, len(taken), self.stride)
        return [self._unpack(taken[begin : begin + self._record]) for begin in begins]

    def close(self) -> None:
        self._words.release()
        for each in (self._data, self._reader):
            with suppress(BufferError):
                each.close()
