# SPDX-License-Identifier: Apache-2.0
"""The sizes of maps that an operator may choose, and their record in the state directory.

Maps of other sizes than in maps.h are in directories of their own (state_dir.py), with a record for
commands that look for them. The record is written when the sizes are in force; a node with the
usual sizes has none:

    <state-dir>/map-sizes -> "backends=262144,flows=1048576"
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from ebpflb.kernel.maps.layout import MAPS, MapSpec

SIZES_LINK = "map-sizes"

# The operator's name of a size -> the maps that have this number of entries.
SIZES = {
    "frontends": ("services", "cluster_ips"),
    "backends": ("backend_slots", "backend_names", "backend_stats", "backend_loads"),
    "slots": ("slots",),
    "tables": ("choices",),
    "source-ranges": ("source_ranges",),
    "flows": ("tcp_flows",),
    "other-flows": ("other_flows",),
    "affinity": ("affinity", "new_affinity"),
    "sockets": ("sockets",),
    "assignments": ("assignments", "peers"),
    "connections": ("connections",),
}
LEAST_ENTRIES, MOST_ENTRIES = 1024, 1 << 24  # entries
# The latest flows, which are half-open, have as many entries in either table (maps/persistent.h).
_LEAST = dict.fromkeys(("flows", "other-flows"), LEAST_ENTRIES + 2 * MAPS["half_open"].entries)

MapSizes = tuple[tuple[str, int], ...]
"""Names of SIZES with their entries, sorted, without those of maps.h."""

USUAL_SIZES: MapSizes = ()


def usual(name: str) -> int:
    """Return the number of entries in maps.h."""
    return MAPS[SIZES[name][0]].entries


def parse(text: str) -> MapSizes:
    """Parse NAME=ENTRIES,... Raises ValueError."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name not in SIZES:
            raise ValueError(f'"{name}" is none of {", ".join(SIZES)}')
        least = _LEAST.get(name, LEAST_ENTRIES)
        if not (number.isascii() and number.isdecimal() and least <= int(number) <= MOST_ENTRIES):
            raise ValueError(
                f'"{part}" is not {name}=ENTRIES with {least} to {MOST_ENTRIES} entries'
            )
        found[name] = int(number)
    return tuple(sorted((name, size) for name, size in found.items() if size != usual(name)))


def show(sizes: MapSizes) -> str:
    """The inverse of ``parse``."""
    return ",".join(f"{name}={entries}" for name, entries in sizes)


def sized(sizes: MapSizes) -> dict[str, MapSpec]:
    """Return the specs of all maps, with these sizes."""
    entries = {each: size for name, size in sizes for each in SIZES[name]}
    return {
        name: spec._replace(entries=entries.get(name, spec.entries)) for name, spec in MAPS.items()
    }


# The largest possible sizes: the sizes of maps of the past are unknown.
LARGEST = sized(tuple((name, MOST_ENTRIES) for name in SIZES))


def suffix(sizes: MapSizes) -> str:
    """Return the suffix of the directories of such maps."""
    return f"-{hashlib.sha256(show(sizes).encode()).hexdigest()[:8]}" if sizes else ""


def record(state: Path, sizes: MapSizes) -> None:
    """Write the record. Raises OSError."""
    if recorded(state) != sizes:
        (state / SIZES_LINK).unlink(missing_ok=True)
        if sizes:
            (state / SIZES_LINK).symlink_to(show(sizes))


def recorded(state: Path) -> MapSizes:
    """Return the sizes in force; the usual ones if none can be read."""
    with suppress(OSError, ValueError):
        return parse(os.readlink(state / SIZES_LINK))
    return USUAL_SIZES
