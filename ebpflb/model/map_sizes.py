# SPDX-License-Identifier: Apache-2.0
"""The sizes of maps that an operator may set with --map-size, as NAME=ENTRIES,..."""

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
HALF_OPEN = 32768
_LEAST = dict.fromkeys(("flows", "other-flows"), LEAST_ENTRIES + 2 * HALF_OPEN)

MapSizes = tuple[tuple[str, int], ...]
"""Names of SIZES with their entries, sorted."""


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
    return tuple(sorted(found.items()))


def show(sizes: MapSizes) -> str:
    """The inverse of ``parse``."""
    return ",".join(f"{name}={entries}" for name, entries in sizes)
