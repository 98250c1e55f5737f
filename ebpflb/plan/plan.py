# SPDX-License-Identifier: Apache-2.0
"""A plan says what to write into the maps, in which order; nothing is written by making one."""

from dataclasses import dataclass, field, fields

from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName
from ebpflb.plan.entries import (
    Backend,
    BackendName,
    Choice,
    Frontend,
    ServiceEntry,
    SourceRange,
    Table,
    Translation,
)

TRANSLATIONS = ("translations", "removed_translations")  # the parts that no map has


@dataclass
class Plan:
    """The writes, to be made field after field in this order: first new entries, then frontends,
    then the removal of entries that nothing refers to any more.

    Ports that a cluster IP does not have are refused. So it is known only while all its frontends
    are there: somebody else may have served it before, and may serve it afterwards.
    """

    # Of the engine netfilter: backend id, and its endpoint's address and port.
    translations: list[Translation] = field(default_factory=list)
    slots: list[tuple[int, Backend]] = field(default_factory=list)
    backend_slots: list[tuple[int, int]] = field(default_factory=list)  # backend id, slot
    tables: list[Table] = field(default_factory=list)  # new ones, in map choices
    choices: list[tuple[int, Choice]] = field(default_factory=list)  # those that were wrong
    service_names: list[tuple[int, PortName]] = field(default_factory=list)
    backend_names: list[tuple[int, BackendName]] = field(default_factory=list)
    source_ranges: list[tuple[SourceRange, int]] = field(default_factory=list)
    services: list[tuple[Frontend, ServiceEntry]] = field(default_factory=list)
    cluster_ips: list[tuple[Address, int]] = field(default_factory=list)
    removed_cluster_ips: list[Address] = field(default_factory=list)
    removed_services: list[Frontend] = field(default_factory=list)
    removed_source_ranges: list[SourceRange] = field(default_factory=list)
    removed_service_names: list[int] = field(default_factory=list)
    # Of backends: clients' affinity to them and sockets' assignments to them end with this write.
    removed_backend_slots: list[int] = field(default_factory=list)
    removed_backend_names: list[int] = field(default_factory=list)
    # Those of ids whose quarantine is over.
    removed_translations: list[Translation] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, part.name) for part in fields(self))

    def __repr__(self) -> str:
        return (
            f"<Plan frontends ~{len(self.services)} -{len(self.removed_services)}, "
            f"slots ~{len(self.slots)}, backends -{len(self.removed_backend_names)}>"
        )
