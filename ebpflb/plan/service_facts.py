# SPDX-License-Identifier: Apache-2.0
"""What the agent knows of one Service -> its page, with the reason for each endpoint not used.

The reasons come from model/unused.py, and from what the planner knows: another service has the
address, or no space is left.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ebpflb.model import endpoints, on_removal, unused
from ebpflb.model.endpoint_slices import StoredSlice
from ebpflb.model.events import Key
from ebpflb.model.selection import Topology, select
from ebpflb.model.services import PortName, ServicePort
from ebpflb.model.unused import LeftOut, UnusedReason, Use
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.entries import Frontend
from ebpflb.plan.planner import Planner
from ebpflb.plan.service_entries import NO_ENTRIES, ServiceEntries
from ebpflb.plan.service_page import (
    UNUSED,
    USED,
    EndpointRow,
    LeftOutRow,
    PortPage,
    ServicePage,
    frontend_row,
    programmed_port,
)
from ebpflb.plan.wording import host_port, service_name


class PortFacts(NamedTuple):
    """What is known of one service port, as values that do not change any more."""

    port: ServicePort
    desired: DesiredService | None  # None: not planned yet
    entries: ServiceEntries
    owners: Mapping[Frontend, PortName]  # of the frontends that it wants: who gets each
    not_programmed: str


class ServiceFacts(NamedTuple):
    key: Key
    ports: tuple[PortFacts, ...]
    slices: tuple[StoredSlice, ...]
    topology: Topology
    notes: tuple[str, ...] = ()


def port_facts(port: ServicePort, planner: Planner) -> PortFacts:
    """As the planner has it now; to be called by the thread that plans."""
    name, claims = port.name, planner.claims
    desired = claims.desired.get(name)
    return PortFacts(
        port,
        desired,
        planner.actual.get(name, NO_ENTRIES),
        {f: claims.claimants[f][0] for f in (desired.frontends if desired else ())},
        lack.reason if (lack := planner.waiting.lacks.get(name)) else "",
    )


def service_page(facts: ServiceFacts) -> ServicePage:
    """All of it, in the order of ports and of the endpoints' addresses."""
    ports = [each.port for each in facts.ports]
    return ServicePage(
        str(facts.key),
        [_port_page(each, facts) for each in facts.ports],
        [_left_out_row(each) for each in unused.left_out(facts.slices, ports)],
        list(facts.notes),
    )


def _port_page(facts: PortFacts, service: ServiceFacts) -> PortPage:
    page = programmed_port(facts.port.name, facts.entries)
    page.affinity_seconds = facts.port.affinity_seconds
    page.on_removal = on_removal.in_words(facts.port.reset_after)
    page.problem = _no_space(facts)
    if facts.desired:
        page.frontends = [
            frontend_row(f, flags, facts.entries, _missing_frontend(f, facts))
            for f, flags in facts.desired.frontends.items()
        ]
    page.endpoints = [*_endpoint_rows(facts, service, page.endpoints)]
    return page


def _endpoint_rows(
    facts: PortFacts, service: ServiceFacts, slots: list[EndpointRow]
) -> Iterator[EndpointRow]:
    """Every endpoint of the slices; then what the slots still hold of others."""
    found = endpoints.merge(service.slices, facts.port.name, service.topology.node)
    selected = select(found, service.topology)
    chosen = unused.chosen(facts.port, selected)
    left = {row.endpoint: row for row in slots}
    for use in unused.uses(facts.port, found, selected, service.topology):
        each = use.endpoint
        name = host_port(each.address, each.port)
        row = left.pop(name, None) or EndpointRow(name, each.name.node, each.name.target, UNUSED)
        if row.state == USED:
            row.not_local = use.not_in_local or ""
        else:
            row.reason = _not_programmed(facts) if id(each) in chosen else _not_selected(use)
        yield row
    for row in left.values():
        row.reason = UnusedReason.GONE
        yield row


def _not_selected(use: Use) -> str:
    return use.not_in_cluster or use.not_in_local or ""


def _no_space(facts: PortFacts) -> str:
    """Which map has none left for the service port; "" where it fits."""
    return f"{UnusedReason.NO_SPACE}: {facts.not_programmed}" if facts.not_programmed else ""


def _not_programmed(facts: PortFacts) -> str:
    """Why an endpoint that is selected has no slot."""
    if facts.not_programmed:
        return _no_space(facts)
    if facts.desired and facts.port.name not in facts.owners.values():
        older = sorted({_service(name) for name in facts.owners.values()})
        return f"{UnusedReason.CLAIMED}: {', '.join(older)}"
    return UnusedReason.NOT_WRITTEN


def _missing_frontend(frontend: Frontend, facts: PortFacts) -> str:
    owner = facts.owners[frontend]
    if owner != facts.port.name:
        return f"claimed by the older service {_service(owner)}"
    if frontend in facts.entries.services:
        return ""
    return _no_space(facts) or UnusedReason.NOT_WRITTEN


def _left_out_row(left: LeftOut) -> LeftOutRow:
    endpoint = left.endpoint
    return LeftOutRow(
        str(endpoint.address or ""),
        endpoint.name.node,
        endpoint.name.target,
        left.slice,
        service_name(left.port, 0) if left.port else "",
        left.reason,
    )


def _service(name: PortName) -> str:
    return f"{name.namespace}/{name.service}"
