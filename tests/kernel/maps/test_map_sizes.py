# SPDX-License-Identifier: Apache-2.0
"""--map-size: its syntax, the maps that it makes, and its record."""

import os
import re
from pathlib import Path

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel.maps import layout, state_dir
from ebpflb.kernel.maps.bpf_map import Map, counter_parts
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.model import addresses
from ebpflb.model.addresses import HALF_OPEN, SIZES
from tests.docs.pages import ROOT
from tests.kernel.variants import needs_root

FIXED = {
    "secret": "one value",
    "socket_places": "programs count on its size",
    "sockets_full": "three counters",
    "sweeps": "one for each table of flows",
    "flow_stats": "one for each table of flows",
    "half_open": "programs count on its size",
    "service_names": "by service id, of which slots hold 16 bits",
    "service_stats": "by service id",
}


def test_every_persistent_map_has_a_size_or_a_reason() -> None:
    """Every persistent map has a size or a reason, and maps of one name have the same size."""
    named = [each for maps in SIZES.values() for each in maps]
    persistent = {name for name, spec in layout.MAPS.items() if spec.persistent}
    assert sorted([*named, *FIXED]) == sorted({*persistent, "service_places"})
    assert all(len({layout.MAPS[it].entries for it in maps}) == 1 for maps in SIZES.values())


def test_half_open_flows() -> None:
    """The minimum size of a table of flows follows from this map's size."""
    assert layout.MAPS["half_open"].entries == HALF_OPEN


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("flow=70000", '"flow" is not one of frontends, backends, '),
        ("slots", '"slots" is not slots=ENTRIES with 1024 to 16777216 entries'),
        ("slots=1023", '"slots=1023" is not slots=ENTRIES with 1024 to 16777216 entries'),
        ("slots=-4096", '"slots=-4096" is not '),
        ("slots=4k", '"slots=4k" is not '),
        ("slots=16777217", '"slots=16777217" is not '),
        ("flows=65536", '"flows=65536" is not flows=ENTRIES with 66560 to '),
    ],
)
def test_the_error_has_the_valid_form(text: str, reason: str) -> None:
    """The error says what is wrong, and the valid form."""
    with pytest.raises(ValueError) as error:
        addresses.parse_map_sizes(text)
    assert str(error.value).startswith(reason)


def test_the_usual_sizes_need_no_record(tmp_path: Path) -> None:
    """The usual sizes need no record; an unreadable record is treated as missing."""
    sizes = addresses.parse_map_sizes("flows=80000,slots=4096")
    state_dir.write_sizes(tmp_path, sizes)
    assert state_dir.read_sizes(tmp_path) == sizes
    state_dir.write_sizes(tmp_path, ())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / state_dir.SIZES_LINK).symlink_to("nonsense")
    assert state_dir.read_sizes(tmp_path) == ()


@needs_root
def test_other_sizes_are_other_maps(home: StateDir) -> None:
    """Commands read the former maps until the new ones are in force, then the new ones."""
    usual = addresses.parse_map_sizes(f"slots={layout.usual_size('slots')}")
    sizes = addresses.parse_map_sizes("slots=2048,sockets=4096")
    former, new = StateDir(home.directory, usual), StateDir(home.directory, sizes)
    for state in (former, new):
        state.prepare()
        for opened in state.open_maps().values():
            opened.close()
    assert _entries(StateDir(home.directory)) == layout.usual_size("slots")
    new.remove_old_layouts()
    assert _entries(StateDir(home.directory)) == 2048
    assert not former.maps_directory.exists()
    with pytest.raises(NodeError, match="another version"):
        former.read_maps()


@needs_root
def test_a_lost_record_is_put_back(home: StateDir) -> None:
    """The audit names the missing record: without it commands would open the usual maps."""
    state = StateDir(home.directory, addresses.parse_map_sizes("slots=2048"))
    state.prepare()
    maps = state.open_maps()
    state.restore_pins(maps)
    assert not [*state.pin_faults(maps)]
    os.unlink(home.directory / state_dir.SIZES_LINK)
    assert [each.found for each in state.pin_faults(maps)] == ["differs from --map-size"]
    state.restore_pins(maps)
    assert state_dir.read_sizes(home.directory) == state.sizes
    for opened in maps.values():
        opened.close()


def _entries(state: StateDir) -> int:
    maps = state.read_maps()
    for opened in maps.values():
        opened.close()
    return maps["slots"].spec.entries


# The maps take as much of the kernel's memory as the pages say where a limit is sized.

PAGES = ("docs/scale.md", "deploy/chart/ebpflb/values.yaml")
FIGURES = re.compile(r"(\d+) MB,? and ([\d.]+) MB for each possible CPU")
ACCURATE = (6, 3)  # since then the kernel counts what a map really takes


def figures(page: str) -> list[tuple[float, float]]:
    """Return the page's figures in MB: for all CPUs together, and for each."""
    return [(float(a), float(b)) for a, b in FIGURES.findall((ROOT / page).read_text())]


def memory_of(opened: Map) -> int:
    """Return the memory in bytes, from /proc."""
    text = Path(f"/proc/self/fdinfo/{opened.fd}").read_text()
    return int(text.partition("memlock:")[2].split()[0])


def test_pages_agree() -> None:
    """Each page has the figures once, and all pages have the same figures."""
    (said,) = figures(PAGES[0])
    assert [figures(page) for page in PAGES] == [[said]] * len(PAGES)


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < ACCURATE,
    reason="this kernel does not count all memory of a map",
)
def test_as_measured(all_maps: dict[str, Map]) -> None:
    """The pages are right within 2 %, counting CPUs that may be added."""
    ((of_all, of_each),) = figures(PAGES[0])
    measured = sum(map(memory_of, all_maps.values())) / 1e6
    assert measured == pytest.approx(of_all + of_each * counter_parts(), rel=0.02)
