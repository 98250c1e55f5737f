# SPDX-License-Identifier: Apache-2.0
"""What the maps hold already, read back at start, so that a restart writes nothing.

Whatever a crash left behind is sorted out here: a service whose frontends were flipped only in
part has one block adopted and the others rest; frontends without a name and names without
frontends are leftovers, which the first complete plan takes away.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from ebpflb.model.services import PortName
from ebpflb.plan.entries import Backend, BackendName, Frontend, Range, Service


class Programmed(NamedTuple):
    """What the maps hold of one service port; ``names`` go with ``backends``, slot by slot."""

    id: int
    block: Range
    services: dict[Frontend, Service]
    backends: tuple[Backend, ...]
    names: tuple[BackendName, ...]


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
    backends = tuple(slots(block.base + index) for index in range(block.size))
    if any(backend.service != number for backend in backends):
        backends, block = (), Range(0, 0)
    names = tuple(backend_names.get(b.id, BackendName("", "")) for b in backends)
    return Programmed(number, block, services, backends, names)


def _check_members(present: Present, found: Programmed, members: Callable[[int], int]) -> None:
    """What a wrong member points to must stay until the member is mended."""
    for slot, backend in enumerate(found.backends, found.block.base):
        written = members(backend.id)
        if written != slot:
            present.wrong_members.append((backend.id, slot))
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
    used = {b.id for programmed in present.programmed.values() for b in programmed.backends}
    present.stray_backend_ids |= backend_names.keys() - used
