# SPDX-License-Identifier: Apache-2.0
"""What the maps hold already, read back at start, so that a restart writes nothing.

Whatever a crash left behind is sorted out here: a service whose frontends were flipped only in
part has one block adopted and the others rest; frontends without a name and names without
frontends are leftovers, which the first complete plan takes away.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from ebpflb.model.services import PortName
from ebpflb.plan.entries import Backend, BackendName, Frontend, Range, Service
from ebpflb.plan.wanted import WantedBackend

NAMELESS = BackendName("", "")


class Programmed(NamedTuple):
    """What the maps hold of one service port: backends slot by slot, and an id for each."""

    id: int
    block: Range
    services: dict[Frontend, Service]
    backends: tuple[WantedBackend, ...]
    ids: tuple[int, ...]

    def slots(self) -> Iterator[tuple[int, Backend]]:
        """The block, index by index."""
        for slot, (wanted, id) in enumerate(zip(self.backends, self.ids, strict=True)):
            backend = Backend(wanted.address, wanted.port, wanted.flags, id, self.id)
            yield self.block.base + slot, backend

    def members(self) -> Iterator[tuple[int, int]]:
        """The slot of each id."""
        return ((id, self.block.base + slot) for slot, id in enumerate(self.ids))


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
    wrong_members: list[tuple[int, int]] = field(default_factory=list)  # as they should be


def read_back(
    services: Iterable[tuple[Frontend, Service]],
    slots: Callable[[int], Backend],
    members: Callable[[int], int],
    service_names: Mapping[int, PortName],
    backend_names: Mapping[int, BackendName],
) -> Present:
    """Sorts the maps' content by service port; ``slots`` and ``members`` look up one index."""
    by_id: dict[int, dict[Frontend, Service]] = defaultdict(dict)
    for frontend, service in services:
        by_id[service.id][frontend] = service
    present = Present()
    for number, name in service_names.items():
        if name in present.programmed:
            present.stray_service_ids.add(number)
        else:
            found = _programmed(number, by_id[number], slots, backend_names)
            present.programmed[name] = found
            present.stray_blocks |= {s.block for s in found.services.values()} - {found.block}
            _check_members(present, found, members)
    _gather_strays(present, by_id, backend_names)
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
    backend_names: Mapping[int, BackendName],
) -> None:
    kept = {programmed.id for programmed in present.programmed.values()}
    for number, services in by_id.items():
        if number not in kept:
            present.stray_service_ids.add(number)
            present.stray_services += services
            present.stray_blocks |= {service.block for service in services.values()}
    used = {id for programmed in present.programmed.values() for id in programmed.ids}
    present.stray_backend_ids |= backend_names.keys() - used
