# SPDX-License-Identifier: Apache-2.0
"""How full the maps are; only the pinned maps are read."""

from collections.abc import Iterable, Mapping

import msgspec

from ebpflb.entries.services import Range
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.sweep import FLOW_MAPS, FlowTable

_COUNTED = ("services", "service_names", "backend_names", "source_ranges")


class MapFill(msgspec.Struct):
    """The number of entries in use, and ``limit``, the number that the map can hold."""

    name: str
    entries: int
    limit: int

    @property
    def share(self) -> float:
        """The used part of the map, from 0 to 1."""
        return self.entries / self.limit if self.limit else 0.0


def map_fill(maps: Mapping[str, Map]) -> list[MapFill]:
    """Return the fill of the maps that the agent plans, and of the flow tables at the last sweep.

    The fullest map is first. In arrays, only the elements that Services use are counted. Raises
    KernelError.
    """
    services = [entry for _, entry in maps["services"].items()]
    counts = {
        **{name: maps[name].count() for name in _COUNTED},
        "slots": _size(entry.block for entry in services),
        "choices": _size(entry.tables for entry in services),
        **{name: FlowTable(maps, name).numbers.entries for name in FLOW_MAPS},
    }
    found = [MapFill(name, count, maps[name].spec.entries) for name, count in counts.items()]
    return sorted(found, key=lambda fill: -fill.share)


def _size(ranges: Iterable[Range]) -> int:
    """Return the total size of all ranges; frontends of a service share a range."""
    return sum(each.size for each in set(ranges))
