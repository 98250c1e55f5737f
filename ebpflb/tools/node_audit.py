# SPDX-License-Identifier: Apache-2.0
"""One comparison of a node's hooks, devices, pins and maps, read-only, agent or no agent.

Without an agent nobody knows which programs are its own, so it is only asked whether there are any.
The devices that are to have programs are those of map devices.
"""

import socket
from collections.abc import Iterator, Mapping, Set
from contextlib import closing
from pathlib import Path

from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.cgroup_links import HeldLinks
from ebpflb.kernel.attach.device_programs import attacher
from ebpflb.kernel.map_writer import capacity_of
from ebpflb.kernel.maps.bpf_map import Map, MappedArray
from ebpflb.kernel.maps.no_frontends import NoFrontends
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.maps.translations import Translations
from ebpflb.kernel.netfilter import flowtable, nft
from ebpflb.kernel.netfilter.elements import Elements
from ebpflb.kernel.netfilter.flowtable import flowtable_obstacle
from ebpflb.kernel.netfilter.rules import TABLE, table_options
from ebpflb.kernel.netfilter.table import NetfilterTable
from ebpflb.kernel.sound_contents import SoundContents
from ebpflb.model.devices import Device
from ebpflb.model.drift import Drift, Part
from ebpflb.options import Options
from ebpflb.plan import comparison
from ebpflb.plan.comparison import DIFFERS, MISSING, NOT_PLANNED, Wrong
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.planner import Planner


def attachments(state: StateDir, cgroup: Path, maps: Mapping[str, Map]) -> Iterator[Drift]:
    """Hooks and devices without a program or pin. Raises KernelError, or OSError."""
    yield from cgroup_links.faults(state, cgroup)
    names = dict(socket.if_nameindex())
    for index, _ in sorted(maps["devices"].items()):
        if index in names:
            device = Device(index, names[index], False, True, 0, (), ())
            yield from attacher(state).faults(device, {}, HeldLinks())


def contents(maps: Mapping[str, Map]) -> MapContents:
    """The services' entries; what no agent can have written is logged, and left as it is."""
    return SoundContents(maps, capacity_of(maps), repair=False).read_back()


def inconsistent(maps: Mapping[str, Map], found: MapContents) -> Iterator[Drift]:
    """Entries that do not fit to each other, whatever the cluster's objects are."""
    wrong = [Wrong("backend_slots", pair, DIFFERS) for pair in found.wrong_backend_slots]
    wrong += [Wrong("removed_services", key, NOT_PLANNED) for key in found.leftover_services]
    found_ids = sorted(found.leftover_backend_ids)
    wrong += [Wrong("removed_backend_names", id, NOT_PLANNED) for id in found_ids]
    planner = Planner(capacity_of(maps), found)
    read = {name: opened.get for name, opened in maps.items()}
    for port in planner.actual:
        wrong += filter(None, comparison.compare_service(planner, port, read))
    yield from (each.drift for each in wrong)


def wrong_bits(maps: Mapping[str, Map], found: MapContents) -> Iterator[Drift]:
    """Words of map no_frontends that do not fit to map services."""
    bits = maps["no_frontends"]
    assert isinstance(bits, MappedArray)
    wanted = NoFrontends(bits)
    wanted.load(found.frontends())
    yield from (Drift(Part.MAP, f"map no_frontends: #{at}", DIFFERS) for at in wanted.wrong())


def table(maps: Mapping[str, Map], options: Options | None, but: Set[int]) -> Iterator[Drift]:
    """The nft table of the engine netfilter, where it serves, with its elements.

    ``options`` are the last agent's; without them only a missing table is found. ``but`` are the
    ids of backends whose slots differ, so that nothing is known of their elements. An element that
    should not exist does no harm: its id may be in quarantine. Raises NodeError.
    """
    flags = maps["settings"].get(0).flags
    if "netfilter" not in flags or "shadow" in flags:
        return
    if not nft.exists(TABLE):
        yield Drift(Part.TABLE, str(TABLE), MISSING)
    elif options:
        wanted = table_options(options, sctp="netfilter_sctp" in flags)
        with closing(NetfilterTable(wanted, owns=False)) as found:
            for said in found.differences():
                yield Drift(Part.TABLE, str(TABLE), said)
            yield from _elements(Elements(found.session, wanted), Translations(maps), but)


def _elements(elements: Elements, wanted: Translations, but: Set[int]) -> Iterator[Drift]:
    elements.read()
    for changes in elements.compare(wanted):
        for change in changes:
            if change.new is not None and change.backend_id not in but:
                yield Drift(Part.TABLE, f"{TABLE}: {change}", "")


def in_flowtable(maps: Mapping[str, Map]) -> Iterator[Drift]:
    """What --fast-forward has there, where the engine netfilter serves. Raises NodeError."""
    flags = maps["settings"].get(0).flags
    if not {"netfilter", "fast_forward"} <= flags or "shadow" in flags or flowtable_obstacle():
        return
    names = dict(socket.if_nameindex())
    devices = {names[index]: index for index, _ in maps["devices"].items() if index in names}
    addresses = [address for address, _ in maps["node_addresses"].items()]
    frontends = flowtable.elements((key for key, _ in maps["services"].items()), addresses)
    wanted = flowtable.InFlowtable(devices, frontends)
    for said in flowtable.differences(flowtable.read(flowtable.TABLE), wanted):
        yield Drift(Part.FLOWTABLE, str(flowtable.TABLE), said)
