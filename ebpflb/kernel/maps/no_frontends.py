# SPDX-License-Identifier: Apache-2.0
"""The map no_frontends: its bits tell programs where no frontend is, so that they skip the look-up.

Each frontend has a bit: a hash of its address, port and protocol, or for a NodePort its port. A bit
is set while no frontend has it. In a new map no bit is set, so programs look everything up. A bit
is cleared before a frontend is written, and set after the frontend was removed.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from struct import pack

from ebpflb.entries.services import Frontend
from ebpflb.kernel.maps.bpf_map import MappedArray
from ebpflb.kernel.maps.layout import MAPS

WORDS = MAPS["no_frontends"].entries
_PORTS = 1 << 16
PLACES = 64 * WORDS - _PORTS  # FRONTEND_PLACES of bpf/rules/frontend.h
_ALL = (1 << 64) - 1
_MAPPED = 0xFFFF << 32  # of a v4-mapped address


class NoFrontends:
    """The bits of all frontends; ``opened`` is the map.

    Raises KernelError if it cannot be written.
    """

    def __init__(self, opened: MappedArray) -> None:
        self._map = opened
        self.load(())

    def load(self, frontends: Iterable[Frontend]) -> None:
        """Set the complete list of frontends in map services. ``repair`` writes the bits."""
        self._known = set(frontends)
        self._counts = Counter(map(bit_of, self._known))
        self._words = [_ALL] * WORDS
        for bit in self._counts:
            self._words[bit // 64] &= ~(1 << bit % 64)

    def before_writing(self, frontends: Iterable[Frontend]) -> None:
        """Clear the bits of frontends that map services will get."""
        new = {each for each in frontends if each not in self._known}
        self._known |= new
        taken = Counter(map(bit_of, new))
        self._flip(bit for bit in taken if not self._counts[bit])
        self._counts.update(taken)

    def after_removing(self, frontends: Iterable[Frontend]) -> None:
        """Set the bits of frontends that map services no longer has."""
        gone = self._known.intersection(frontends)
        self._known -= gone
        freed = Counter(map(bit_of, gone))
        self._counts.subtract(freed)
        self._flip(bit for bit in freed if not self._counts[bit])

    def wrong(self) -> list[int]:
        """Return the numbers of the words that differ from the plan."""
        found, wanted = self._map.memory[: 8 * WORDS], self._packed()
        if found == wanted:
            return []
        return [n for n in range(WORDS) if found[8 * n : 8 * n + 8] != wanted[8 * n : 8 * n + 8]]

    def repair(self) -> None:
        """Write all words at once if one is wrong; in a new map all are wrong."""
        if self._map.memory[: 8 * WORDS] != (wanted := self._packed()):
            self._map.write_run(0, array("I", wanted))

    def _packed(self) -> bytes:
        return pack(f"={WORDS}Q", *self._words)

    def _flip(self, bits: Iterable[int]) -> None:
        changed = set()
        for bit in bits:
            self._words[bit // 64] ^= 1 << bit % 64
            changed.add(bit // 64)
        self._map.write([(at, self._words[at]) for at in changed])


def bit_of(frontend: Frontend) -> int:
    """Return the frontend's bit, as frontend_bit of bpf/rules/frontend.h computes it."""
    address, port, protocol = frontend
    number = int(address)
    if not number:
        return PLACES + port
    number |= _MAPPED if address.version == 4 else 0
    mixed = ((number >> 64 ^ (port << 8 | protocol)) * 0x94D049BB133111EB ^ number) & _ALL
    mixed = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15 & _ALL
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _ALL
    return (mixed >> 32) % PLACES
