# SPDX-License-Identifier: Apache-2.0
"""How many entries the maps hold that programs fill, counted once a minute if metrics are read.

The kernel keeps no count of a map's entries, so they are counted by reading all of them. A thread
does this, a slice at a time with pauses between; readers get the result of the last count.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct

from ebpflb.entries.flows import Hook
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import MAPS, columns, names
from ebpflb.kernel.maps.sweep import FLOW_MAPS, SWEEP_PAUSE_FACTOR, SWEEP_SLICE
from ebpflb.model.services import Protocol
from ebpflb.workers import Count

COUNT_INTERVAL = 60.0  # seconds between two counts, if metrics are read

# The maps that programs fill, except the flows, which the sweeper counts (sweep.py).
_FILLED = [n for n, s in MAPS.items() if s.is_filled_by_programs and n not in FLOW_MAPS]
COUNTED_MAPS = (*_FILLED, "connections", "socket_places")

_FLAGS = {word: bit for bit, word in names("flow_flag", "FLOW_").items()}
_REQUEST = _FLAGS["request"]
_KEY = columns("struct tuple", protocol="B", hook="B")
_VALUE = columns("struct flow", flags="H")
_PLACE = columns("struct socket_place", socket="Q")
_UNCOUNTED = columns("struct backend_load", uncounted="I")


class Counts(Struct, frozen=True):
    """The result of one count.

    ``at`` is in seconds since the epoch; ``entries`` by map, ``flows`` by protocol. ``uncounted``
    are connections that least-connections did not count, since the maps were created.
    """

    at: float
    entries: Mapping[str, int]
    flows: Mapping[Protocol, int]
    uncounted: int


NO_COUNTS = Counts(0.0, {}, {}, 0)


class Occupancy(Count[Counts]):
    """Count the entries of all maps; ``latest`` is NO_COUNTS before the first count has ended."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        super().__init__("maps", COUNT_INTERVAL, self._all, NO_COUNTS)
        self._maps = maps

    def _all(self) -> Counts:
        entries = {name: self._entries(name) for name in COUNTED_MAPS}
        return Counts(time.time(), entries, self._flows(), self._uncounted())

    def _entries(self, name: str) -> int:
        """Count the keys of a hash, and the places that sockets occupy."""
        if name == "socket_places":
            places = (_PLACE.iter_unpack(values) for _, values in self._slices(name))
            return sum(socket != 0 for part in places for (socket,) in part)
        size = self._maps[name].spec.key_size
        return sum(len(keys) // size for keys, _ in self._slices(name))

    def _flows(self) -> dict[Protocol, int]:
        """Count each flow by one of its entries: the client's request at ingress."""
        found: Counter[int] = Counter()
        for name in FLOW_MAPS:
            for keys, values in self._slices(name):
                pairs = zip(_KEY.iter_unpack(keys), _VALUE.iter_unpack(values), strict=True)
                found.update(
                    protocol
                    for (protocol, hook), (flags,) in pairs
                    if hook == Hook.INGRESS and flags & _REQUEST
                )
        return {protocol: found[protocol] for protocol in Protocol}

    def _uncounted(self) -> int:
        values = (values for _, values in self._slices("backend_loads"))
        return sum(count for each in values for (count,) in _UNCOUNTED.iter_unpack(each))

    def _slices(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        begun = time.monotonic()
        for part in self._maps[name].slices(SWEEP_SLICE):
            yield part
            if self.stopped.wait(SWEEP_PAUSE_FACTOR * (time.monotonic() - begun)):
                return
            begun = time.monotonic()
