# SPDX-License-Identifier: Apache-2.0
"""What the maps hold already, read back at start, so that a restart writes nothing.

Whatever a crash left behind is sorted out here: a service whose frontends were flipped only in
part has one block adopted and the others rest; frontends without a name, names without frontends
and source ranges of nobody are leftovers, which the first complete plan takes away.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName
from ebpflb.plan.entries import Backend, BackendName, Frontend, Range, Service, SourceRange
from ebpflb.plan.programmed import Programmed
from ebpflb.plan.wanted import WantedBackend

NAMELESS = BackendName("", "")


@dataclass
class Present:
    """The maps' content by service port, and what belongs to none.

    ``stray_blocks`` and stray ids are named by leftovers, so they rest before they are used.
    """

    programmed: dict[PortName, Programmed] = field(default_factory=dict)
    stray_services: list[Frontend] = field(default_factory=list)
    stray_service_ids: set[int] = field(default_factory=set)
    stray_backend_ids: set[int] = field(default_factory=set)
    stray_blocks: set[Range] = field(default_factory=set)
    stray_source_ranges: list[SourceRange] = field(default_factory=list)
    cluster_ips: set[Address] = field(default_factory=set)
    wrong_members: list[tuple[int, int]] = field(default_factory=list)  # as they should be


def read_back(
    services: Iterable[tuple[Frontend, Service]],
    slots: Callable[[int], Backend],
    members: Callable[[int], int],
    service_names: Mapping[int, PortName],
    backend_names: Mapping[int, BackendName],
    source_ranges: Iterable[SourceRange] = (),
    cluster_ips: Iterable[Address] = (),
) -> Present:
    """Sorts the maps' content by service port; ``slots`` and ``members`` look up one index."""
    by_id: dict[int, dict[Frontend, Service]] = defaultdict(dict)
    for frontend, service in services:
        by_id[service.id][frontend] = service
    ranges_of: dict[int, set[SourceRange]] = defaultdict(set)
    for range in source_ranges:
        ranges_of[range.service].add(range)
    present = Present(cluster_ips=set(cluster_ips))
    for number, name in service_names.items():
        if name in present.programmed:
            present.stray_service_ids.add(number)
        else:
            found = _programmed(number, by_id[number], slots, backend_names)
            if found.restricted:
                found = found._replace(source_ranges=frozenset(ranges_of.pop(number, ())))
            present.programmed[name] = found
            present.stray_blocks |= {s.block for s in found.services.values()} - {found.block}
            _check_members(present, found, members)
    _gather_strays(present, by_id, ranges_of, backend_names)
    return present


def _programmed(
    number: int,
    services: dict[Frontend, Service],
    slots: Callable[[int], Backend],
    backend_names: Mapping[int, BackendName],
) -> Programmed:
    """All that a frontend names were complete when written; the largest has backends, if any."""
    blocks = (service.block for service in services.values())
    block = max(blocks, key=attrgetter("size"), default=Range(0, 0))
    held = [slots(block.base + index) for index in range(block.size)]
    if any(backend.service != number for backend in held):
        held, block = [], Range(0, 0)
    backends = tuple(
        WantedBackend(b.address, b.port, b.flags, backend_names.get(b.id, NAMELESS)) for b in held
    )
    return Programmed(number, block, services, backends, tuple(b.id for b in held))


def _check_members(present: Present, found: Programmed, members: Callable[[int], int]) -> None:
    """What a wrong member points to must stay until the member is mended."""
    for id, slot in found.members():
        written = members(id)
        if written != slot:
            present.wrong_members.append((id, slot))
            present.stray_blocks.add(Range(written, 1))


def _gather_strays(
    present: Present,
    by_id: Mapping[int, dict[Frontend, Service]],
    ranges_of: Mapping[int, set[SourceRange]],
    backend_names: Mapping[int, BackendName],
) -> None:
    kept = {programmed.id for programmed in present.programmed.values()}
    for number, services in by_id.items():
        if number not in kept:
            present.stray_service_ids.add(number)
            present.stray_services += services
            present.stray_blocks |= {service.block for service in services.values()}
    present.stray_service_ids |= ranges_of.keys() - kept
    present.stray_source_ranges += [range for ranges in ranges_of.values() for range in ranges]
    used = {id for programmed in present.programmed.values() for id in programmed.ids}
    present.stray_backend_ids |= backend_names.keys() - used
