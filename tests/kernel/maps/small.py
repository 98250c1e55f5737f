# SPDX-License-Identifier: Apache-2.0
"""Small maps of the real kernel, not pinned."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import SocketEntry

ENTRIES = 4096


@contextmanager
def small_maps(names: Iterable[str], most: int = ENTRIES) -> Iterator[dict[str, Map]]:
    """Return maps by name, each with at most this many entries; they are closed in the end."""
    small = [layout.MAPS[name].at_most(most) for name in names]
    made = {spec.name: bpf_map.open_map(spec, state_dir.create_map(spec)) for spec in small}
    try:
        yield made
    finally:
        for opened in made.values():
            opened.close()


def write_elsewhere(maps: Mapping[str, Map], cookie: int, entry: SocketEntry) -> None:
    """Remember a socket as the hooks do if its place is taken (bpf/sockets/place.h)."""
    streams, datagrams, elsewhere = maps["sockets_full"].get(0)
    maps["sockets_full"].write([(0, (streams, datagrams, elsewhere + 1))])
    maps["sockets"].write([(cookie, entry)])


@contextmanager
def all_maps() -> Iterator[dict[str, Map]]:
    """Return every map of the datapath, unpinned; they are closed in the end."""
    with ExitStack() as opened:
        made: dict[str, Map] = {}
        for name, spec in layout.MAPS.items():
            made[name] = bpf_map.open_map(spec, state_dir.create_map(spec))
            opened.callback(made[name].close)
        yield made
