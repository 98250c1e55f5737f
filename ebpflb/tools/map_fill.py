# SPDX-License-Identifier: Apache-2.0
"""How full the maps are that can fill up. The pinned maps suffice."""

from collections.abc import Mapping

import msgspec

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.sweep import FLOW_MAPS, FlowTable

# A new Service or endpoint finds no space when one of these is full. Of an array, those elements
# count that are in use.
PLANNED = ("services", "service_names", "slots", "backend_names", "source_ranges", "choices")


class MapFill(msgspec.Struct):
    """``limit`` is the number of entries that the map can hold."""

    name: str
    entries: int
    limit: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.entries / self.limit if self.limit else 0.0


def map_fill(maps: Mapping[str, Map]) -> list[MapFill]:
    """Of the maps that the agent plans, and of flows as of the last sweep; the fullest first.

    Raises KernelError.
    """
    found = [MapFill(name, _count(maps[name]), maps[name].spec.entries) for name in PLANNED]
    for name in FLOW_MAPS:
        entries = FlowTable(maps, name).numbers.entries
        found.append(MapFill(name, entries, maps[name].spec.entries))
    return sorted(found, key=lambda fill: -fill.share)


def _count(counted: Map) -> int:
    return sum(len(keys) // counted.spec.key_size for keys, _ in counted.slices())
