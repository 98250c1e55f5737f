# SPDX-License-Identifier: Apache-2.0
"""One comparison of a node's hooks, devices, pins and maps, read-only, agent or no agent;
and of the service ports in the maps with the cluster.

Without an agent nobody knows which programs are its own, so it is only asked whether there are any.
The devices that are to have programs are those of map devices.
"""

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.cgroup_links import HeldLinks
from ebpflb.kernel.attach.device_programs import attacher
from ebpflb.kernel.map_writer import capacity_of
from ebpflb.kernel.maps.bpf_map import Map, MappedArray
from ebpflb.kernel.maps.no_frontends import NoFrontends
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.netfilter import flowtable, nft
from ebpflb.kernel.netfilter.elements import Elements
from ebpflb.kernel.netfilter.rules import TABLE, TableOptions, table_options
from ebpflb.kernel.netfilter.table import NetfilterTable
from ebpflb.kernel.valid_contents import ValidContents
from ebpflb.model.addresses import Address, host_port
from ebpflb.model.devices import Device
from ebpflb.model.drift import Drift, Part
from ebpflb.model.services import PortName
from ebpflb.options import Options
from ebpflb.plan import comparison
from ebpflb.plan.comparison import DIFFERS, MISSING, NOT_PLANNED, Wrong
from ebpflb.plan.desired import DesiredBackend
from ebpflb.plan.entries import (
    Backend,
    Flags,
    Frontend,
    Range,
    service_name,
)
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.planner import Plan, Planner
from ebpflb.plan.service_entries import ServiceEntries


def attachments(state: StateDir, cgroup: Path, maps: Mapping[str, Map]) -> Iterator[Drift]:
    """Hooks and devices without a program or pin. Raises KernelError, or OSError."""
    yield from cgroup_links.faults(state, cgroup)
    names = dict(socket.if_nameindex())
    for index, _ in sorted(maps["devices"].items()):
        if index in names:
            device = Device(index, names[index], False, True, 0, (), ())
            yield from attacher(state).faults(device, {}, HeldLinks(), {})


def contents(maps: Mapping[str, Map]) -> MapContents:
    """The services' entries; what no agent can have written is logged, and left as it is."""
    return ValidContents(maps, capacity_of(maps), repair=False).read_back()


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


def table(
    maps: Mapping[str, Map], options: Options | None, damage: "Damage", but: Set[int]
) -> Iterator[Drift]:
    """The nft table of the engine netfilter, where it serves, with its elements.

    ``options`` are the last agent's; without them only a missing table is found. ``but`` are the
    ids of backends whose slots differ; their elements, and the elements of damaged service ports,
    are not compared. An element that should not exist does no harm: its id may be in quarantine.
    Raises NodeError.
    """
    flags = maps["settings"].get(0).flags
    if "netfilter" not in flags or "shadow" in flags:
        return
    if not nft.exists(TABLE):
        yield Drift(Part.TABLE, str(TABLE), MISSING)
    elif options:
        sctp = "netfilter_sctp" in flags
        either = [table_options(options, sctp=sctp, beside_flows=it) for it in (False, True)]
        wanted = either[0]
        with closing(NetfilterTable(wanted, owns=False)) as found:
            yield from _in_rules(found, either)
            yield from _elements(Elements(found.session, wanted), damage, but)


def _in_rules(table: NetfilterTable, either: Iterable[TableOptions]) -> Iterator[Drift]:
    """Compare with the rules for each of these options; those that differ least are meant."""
    found = []
    for options in either:
        table.set_ports(options)
        found.append(table.differences())
    for said in min(found, key=len):
        yield Drift(Part.TABLE, str(TABLE), said)


def _elements(elements: Elements, damage: "Damage", but: Set[int]) -> Iterator[Drift]:
    ports = damage.contents.entries.items()
    known = [entries for name, entries in ports if name not in damage.names]
    wanted = {
        id: backend.endpoint
        for entries in known
        for id, backend in zip(entries.ids, entries.backends, strict=True)
    }
    elements.read()
    for changes in elements.compare(wanted):
        for change in changes:
            if change.new is not None and change.backend_id not in but:
                yield Drift(Part.TABLE, f"{TABLE}: {change}", "")


def in_flowtable(maps: Mapping[str, Map]) -> Iterator[Drift]:
    """The content of the flowtable, if there is one. Raises NodeError."""
    if not nft.exists(flowtable.TABLE):
        return
    names = dict(socket.if_nameindex())
    devices = {names[index]: index for index, _ in maps["devices"].items() if index in names}
    addresses = [address for address, _ in maps["node_addresses"].items()]
    frontends = flowtable.elements((key for key, _ in maps["services"].items()), addresses)
    wanted = flowtable.InFlowtable(devices, frontends)
    for said in flowtable.differences(flowtable.read(flowtable.TABLE), wanted):
        yield Drift(Part.FLOWTABLE, str(flowtable.TABLE), said)


# What the maps hold of service ports against what the cluster asks for, one line for each cause: a
# slot that differs moves the whole block of its service port in a plan, with its ids and frontends.

_NOT_ASKED = "is not what the cluster asks for"


class Damage(NamedTuple):
    """Slots that no agent has written; ``names`` are the service ports which they keep from being
    compared, and ``contents`` is without what follows from them.
    """

    drifts: list[Drift]
    names: frozenset[PortName]
    contents: MapContents


class _Slot(NamedTuple):
    at: int
    service: int  # the id of the frontends whose block has it
    backend: Backend


def damage(maps: Mapping[str, Map], found: MapContents) -> Damage:
    """``found`` are the maps' entries. A slot is damaged if its check is wrong, it names another
    service than its frontends, or it has the id of a backend in another slot.
    """
    valid = ValidContents(maps, capacity_of(maps), repair=False)
    slots = list(_slots(valid))
    counts = Counter(slot.backend.id for slot in slots)
    wrong = [slot for slot in slots if _is_wrong(slot, counts, valid)]
    ids = {slot.backend.id for slot in wrong}
    services = {slot.service for slot in slots if slot.backend.id in ids} if wrong else set()
    names = {entries.id: name for name, entries in found.entries.items()}
    drifts = [
        Drift(
            Part.MAP,
            f"map slots: #{slot.at} of {service_name(names.get(slot.service), slot.service)}",
            "holds data that no agent wrote",
        )
        for slot in wrong
    ]
    left_out = {slot.at for slot in slots if slot.service in services}
    known = frozenset(names[id] for id in services if id in names)
    return Damage(drifts, known, _without(found, left_out, valid) if wrong else found)


def _slots(valid: ValidContents) -> Iterator[_Slot]:
    """Of each service port the largest block, as it is read back."""
    blocks: dict[int, Range] = {}
    for _, entry in valid.services():
        blocks[entry.id] = max(entry.block, blocks.get(entry.id, Range(0, 0)), key=_size)
    for service, block in sorted(blocks.items()):
        for at, backend in enumerate(valid.slots(block), block.base):
            yield _Slot(at, service, backend)


def _size(block: Range) -> int:
    return block.size


def _is_wrong(slot: _Slot, counts: Mapping[int, int], valid: ValidContents) -> bool:
    id = slot.backend.id
    is_copy = counts[id] > 1 and valid.backend_slot(id) != slot.at
    return slot.backend.service != slot.service or is_copy


def _without(found: MapContents, slots: set[int], valid: ValidContents) -> MapContents:
    """Without the backends of these slots, which belong to no service port any more."""
    ids = {id for id in found.leftover_backend_ids if valid.backend_slot(id) in slots}
    return replace(
        found,
        leftover_backend_ids=found.leftover_backend_ids - ids,
        leftover_translations=[it for it in found.leftover_translations if it.id not in ids],
        wrong_backend_slots=[it for it in found.wrong_backend_slots if it[1] not in slots],
    )


class Planned(NamedTuple):
    """``ids`` are the backends of service ports whose slots differ."""

    drifts: list[Drift]
    ids: Set[int] = frozenset()


def planned(
    plan: Plan, old: Mapping[PortName, ServiceEntries], new: Mapping[PortName, ServiceEntries]
) -> Planned:
    """What the plan would have to write, from the old entries to the new ones."""
    drifts: list[Drift] = []
    moved = _Moved(set(), set(), set(), set())
    for name in sorted(old.keys() & new.keys()):
        if old[name].block != new[name].block:
            drifts += _slot_drifts(service_name(name, 0), old[name], new[name])
            moved.add(old[name], new[name])
    # Of a table its first place stands for all of it.
    named = [it for it in vars(plan).items() if it[0] != "last_ids"]  # not wrong, just not read
    rows = ((name.replace("tables", "choices"), row) for name, rows in named for row in rows)
    others = [Wrong(*it, _NOT_ASKED) for it in rows if not moved.has(*it)]
    return Planned(drifts + [each.drift for each in others], moved.ids)


class _Moved(NamedTuple):
    """Rows of a plan that it has only because blocks move. ``renamed`` are the ids of ``ids`` that
    begin or end with that.
    """

    slots: set[int]
    ids: set[int]
    renamed: set[int]
    frontends: set[Frontend]

    def add(self, old: ServiceEntries, new: ServiceEntries) -> None:
        self.slots.update(at for at, _ in new.slots())
        self.ids.update(old.ids, new.ids)
        self.renamed.update({*old.ids} ^ {*new.ids})
        self.frontends.update(
            frontend
            for frontend, entry in new.services.items()
            if (was := old.services.get(frontend))
            and (was.flags, was.affinity_seconds) == (entry.flags, entry.affinity_seconds)
        )

    def has(self, field: str, row: Any) -> bool:
        key = row[0] if isinstance(row, tuple) else row
        kinds: dict[str, set[Any]] = {
            "slots": self.slots,
            "services": self.frontends,
            "backend_slots": self.ids,
            "translations": self.ids,
            "backend_names": self.renamed,
        }
        return key in kinds.get(field.removeprefix("removed_"), ())


def _slot_drifts(name: str, old: ServiceEntries, new: ServiceEntries) -> Iterator[Drift]:
    """``name`` of the service port."""
    had, wanted = ({_content(each) for each in it.backends} for it in (old, new))
    lacking = [each for each in new.backends if _content(each) not in had]
    for at, there in enumerate(old.backends, old.block.base):
        if _content(there) not in wanted:
            text = _differs(there, _take(there, lacking))
            yield Drift(Part.MAP, f"map slots: #{at} of {name}", text)
    for each in lacking:
        yield Drift(Part.MAP, f"map slots: {name}", f"lacks {host_port(*each.endpoint)}")


def _content(backend: DesiredBackend) -> tuple[Address, int, Flags, int]:
    """Of its slot, which has no names."""
    return *backend.endpoint, backend.flags, backend.weight


def _take(there: DesiredBackend, lacking: list[DesiredBackend]) -> DesiredBackend | None:
    """The one that should be there; of the same endpoint, if it is among them."""
    same = [each for each in lacking if each.endpoint == there.endpoint]
    found = next(iter(same or lacking), None)
    if found:
        lacking.remove(found)
    return found


def _differs(there: DesiredBackend, wanted: DesiredBackend | None) -> str:
    if wanted is None:
        return f"has {host_port(*there.endpoint)}, which is not in the cluster"
    if wanted.endpoint != there.endpoint:
        return f"has {host_port(*there.endpoint)} instead of {host_port(*wanted.endpoint)}"
    return f"has {host_port(*there.endpoint)} as {_traits(there)} instead of {_traits(wanted)}"


def _traits(backend: DesiredBackend) -> str:
    return f"{' '.join(sorted(backend.flags)) or 'unused'}, weight {backend.weight}"
