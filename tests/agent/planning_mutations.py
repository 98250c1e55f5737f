# SPDX-License-Identifier: Apache-2.0
"""Bugs that raise an exception while a Service is planned."""

from typing import Any

import pytest

from ebpflb.agent.service_sync import ServiceSync
from ebpflb.model.endpoints import Selection
from ebpflb.model.services import PortName, ServicePort
from ebpflb.plan.planner import Planner


def in_steps(patched: pytest.MonkeyPatch) -> None:
    desired = ServiceSync._desiring  # noqa: SLF001

    def failing(sync: ServiceSync, port: ServicePort, selection: Selection) -> Any:
        yield 1
        if port.name.service == "web":
            raise ValueError("a mistake")
        return (yield from desired(sync, port, selection))

    patched.setattr(ServiceSync, "_desiring", failing)


def in_the_plan(patched: pytest.MonkeyPatch) -> None:
    """Raise an exception after a part of the plan is made."""
    count = Planner._count  # noqa: SLF001

    def failing(planner: Planner, name: PortName, *entries: Any) -> None:
        count(planner, name, *entries)
        if name.service == "web" and entries[0].id:
            raise ValueError("a mistake")

    patched.setattr(Planner, "_count", failing)


def in_the_middle_of_slots(patched: pytest.MonkeyPatch) -> None:
    """Raise an exception while a part of a new block is written ahead."""
    patched.setattr(Planner, "_write_part", lambda *_: 1 // 0)
