# SPDX-License-Identifier: Apache-2.0
"""What the programs remember of sockets, by cookie: one view of two maps.

A socket's entry is in the array socket_places, at its cookie modulo the number of places, or in the
hash sockets if another open socket has that place (bpf/sockets/place.h). While an entry is read its
place may go to another socket: then the entry of a socket that was just released is wrong, and no
longer matters.
"""

from collections.abc import Iterator, Mapping
from struct import pack

from ebpflb.kernel.maps.bpf_map import Map, Slices, pairs
from ebpflb.kernel.maps.layout import MAPS, columns
from ebpflb.kernel.maps.records import SocketEntry

_ENTRY_SIZE = MAPS["sockets"].value_size
_PLACE = columns("struct socket_place", socket="Q", entry=f"{_ENTRY_SIZE}s")
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
                taken = [(it, entry) for it, entry in _PLACE.iter_unpack(places) if it]
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
