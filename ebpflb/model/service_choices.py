# SPDX-License-Identifier: Apache-2.0
"""What a Service's annotations choose; each has a module of its own, which says what it means."""

from typing import NamedTuple

from ebpflb.model import objects, on_removal, scheduler, slow_start
from ebpflb.model.admission import Admission


class ServiceChoices(NamedTuple):
    """As in ServicePort."""

    scheduler: str
    reset_after: float | None
    slow_start: float


def of(service: objects.Service, admission: Admission, warnings: list[str]) -> ServiceChoices:
    """What cannot be read is a warning, and the default counts."""
    return ServiceChoices(
        scheduler.of(service, admission.scheduler, warnings),
        on_removal.of(service, warnings),
        slow_start.of(service, warnings),
    )
