# SPDX-License-Identifier: Apache-2.0
"""The range of ports that a destination is in, by map services as programs read it."""

from typing import Any
from typing import Protocol as TypingProtocol

from ebpflb.model.annotations import PortRange
from ebpflb.plan.entries import Frontend, ServiceEntry, ranges_in


class Services(TypingProtocol):
    """The map, or a former state of it."""

    def get(self, key: Any) -> Any: ...


def range_at(services: Services, frontend: Frontend) -> PortRange | None:
    """Return the range of the address and protocol that has this port."""
    listed: ServiceEntry | None = services.get(frontend.ranges)
    found = ranges_in(listed) if listed else []
    return next((it for it in found if it.first <= frontend.port <= it.last), None)


def range_read(services: Services, frontend: Frontend) -> ServiceEntry | None:
    """Return the service of this range. bpf/rules/frontend.h."""
    found = range_at(services, frontend)
    entry = services.get(frontend.ranges._replace(port=found.first)) if found else None
    return entry if isinstance(entry, ServiceEntry) else None
