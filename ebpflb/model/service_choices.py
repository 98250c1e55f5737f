# SPDX-License-Identifier: Apache-2.0
"""What a Service's annotations choose; each has a module of its own, which says what it means."""

from collections.abc import Iterator
from typing import NamedTuple

from ebpflb.model import objects, on_removal, scheduler, slow_start
from ebpflb.model.admission import Admission
from ebpflb.model.annotations import misplaced


class ServiceChoices(NamedTuple):
    """As in ServicePort."""

    scheduler: str
    reset_after: float | None
    slow_start: float


def of(service: objects.Service, admission: Admission, warnings: list[str]) -> ServiceChoices:
    """What cannot be read is a warning, and the default counts."""
    if service.metadata.annotations and service.metadata.annotations.weight is not None:
        warnings.append(misplaced(objects.WEIGHT, "a Service", "its EndpointSlices"))
    return ServiceChoices(
        scheduler.of(service, admission.scheduler, warnings),
        on_removal.of(service, warnings),
        slow_start.of(service, warnings),
    )


def warnings_of(slice: objects.EndpointSlice) -> Iterator[str]:
    """One for each annotation of a slice that only a Service can have."""
    its = slice.metadata.annotations
    if not its:
        return
    for name, value in (
        (objects.SCHEDULER, its.scheduler),
        (objects.ON_REMOVAL, its.on_removal),
        (objects.SLOW_START, its.slow_start),
    ):
        if value is not None:
            yield misplaced(name, "an EndpointSlice", "the Service")
