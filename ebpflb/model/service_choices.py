# SPDX-License-Identifier: Apache-2.0
"""What a Service's annotations choose; each has a module of its own, which says what it means."""

from collections.abc import Iterator
from typing import NamedTuple

from ebpflb.model import objects, on_removal, scheduler, slow_start
from ebpflb.model.admission import Admission
from ebpflb.model.annotations import misplaced, unknown

OF_SERVICES = frozenset(
    {objects.NODEPORT_SOURCE_RANGES, objects.SCHEDULER, objects.ON_REMOVAL, objects.SLOW_START}
)
OF_SLICES = frozenset({objects.WEIGHT})


class ServiceChoices(NamedTuple):
    """As in ServicePort."""

    scheduler: str
    reset_after: float | None
    slow_start: float


def of(service: objects.Service, admission: Admission, warnings: list[str]) -> ServiceChoices:
    """What cannot be read is a warning, and the default counts."""
    warnings += _without_effect(service.metadata, OF_SERVICES, "a Service", "its EndpointSlices")
    return ServiceChoices(
        scheduler.of(service, admission.scheduler, warnings),
        on_removal.of(service, warnings),
        slow_start.of(service, warnings),
    )


def warnings_of(slice: objects.EndpointSlice) -> Iterator[str]:
    """One for each annotation of a slice that only a Service can have, and for unknown ones."""
    yield from _without_effect(slice.metadata, OF_SLICES, "an EndpointSlice", "the Service")


def _without_effect(
    metadata: objects.Annotated, its: frozenset[str], kind: str, owner: str
) -> Iterator[str]:
    """Of ours that are not ``its`` each; of those that nobody has, as misspelt ones, the first."""
    others = sorted((metadata.annotations or {}).keys() - its - {objects.TRIGGER_TIME})
    ours = OF_SERVICES | OF_SLICES
    yield from (misplaced(name, kind, owner) for name in others if name in ours)
    yield from [unknown(name, sorted(its)) for name in others if name not in ours][:1]
