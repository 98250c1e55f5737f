# SPDX-License-Identifier: Apache-2.0
"""The maps of a question: pinned ones, by their descriptors, where programs only read them, and
private copies where they write.

Of large tables only the rows are copied that a question is about. Reading a row by bpf(2) does not
make an LRU take it for used.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType

from ebpflb.datapath import kernel
from ebpflb.datapath.maps import bpf_map, layout
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.layout import MapSpec

# What the agent alone writes, and the counts of least-connections, which recording programs only
# read. The first are not RDONLY_PROG: four are written through memory.
SHARED = {
    *("slots", "backend_slots", "choices", "backend_loads"),
    *("service_names", "backend_names", "sweeps"),
    *(name for name, spec in layout.MAPS.items() if "RDONLY_PROG" in spec.flags),
}
MOST_ROWS = 16_384  # of one table are copied
_LRU_ENTRIES = 16_384  # entries: an LRU of few evicts while others are free on another CPU
_PART = 65_536  # entries that are read at once

Matches = Callable[[bytes, bytes], bool]


class PrivateMaps:
    """A node's maps, and private ones in place of those that programs write.

    ``pinned`` is every map as the node has it, to be read only, and closed by who opened it;
    ``maps`` is what programs are loaded with.
    """

    def __init__(self, pinned: Mapping[str, Map]) -> None:
        """Raises KernelError."""
        self.pinned = pinned
        with ExitStack() as opened:
            made = {
                spec.name: _create(spec)
                for spec in (*layout.MAPS.values(), layout.STEPS)
                if spec.name not in SHARED
            }
            for private in made.values():
                opened.callback(private.close)
            self.maps: Mapping[str, Map] = {
                **{name: self.pinned[name] for name in SHARED},
                **made,
            }
            self._opened = opened.pop_all()

    def __enter__(self) -> "PrivateMaps":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()

    def empty(self) -> None:
        """Forgets what was copied, and what programs have written since."""
        for private in self.maps.values():
            if private.spec.is_filled_by_programs:
                for key, _ in list(private.packed_items()):
                    kernel.map_delete(private.fd, key)

    def copy_key(self, name: str, key: bytes) -> None:
        """Copies one row of a table, if it is there."""
        value = kernel.map_lookup(self.pinned[name].fd, key, layout.MAPS[name].value_size)
        if value is not None:
            kernel.map_update(self.maps[name].fd, key, value)

    def copy_rows(self, name: str, parts: Iterable[bytes], matches: Matches) -> bool:
        """Copies the rows of a table in whose key or value one of ``parts`` occurs, and that match.

        False if there are more than MOST_ROWS: then some are missing.
        """
        wanted = [row for row in self._rows_with(name, tuple(parts)) if matches(*row)]
        for key, value in wanted[:MOST_ROWS]:
            kernel.map_update(self.maps[name].fd, key, value)
        return len(wanted) <= MOST_ROWS

    def _rows_with(self, name: str, parts: tuple[bytes, ...]) -> Iterator[tuple[bytes, bytes]]:
        """A search in all bytes of many rows is fast, and most tables have none of the parts."""
        found = self.pinned[name]
        key_size, value_size = found.spec.key_size, found.spec.value_size
        for keys, values in found.slices(_PART):
            if not any(part in keys or part in values for part in parts):
                continue
            for at in range(len(keys) // key_size):
                key = keys[at * key_size : (at + 1) * key_size]
                yield key, values[at * value_size : (at + 1) * value_size]


def _create(usual: MapSpec) -> Map:
    """Empty. Arrays of counters and of places need no entries: programs skip what is not there."""
    entries = _LRU_ENTRIES if usual.is_filled_by_programs else 64
    spec = usual._replace(entries=min(usual.entries, entries))
    return bpf_map.open_map(spec, bpf_map.create_map(spec))
