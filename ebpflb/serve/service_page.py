# SPDX-License-Identifier: Apache-2.0
"""A Service as the operator sees it: frontends, endpoints with their share, and unused endpoints.

The endpoints in use are those in the maps (``ServiceEntries``); the agent's state says why others
are not used.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from ebpflb.entries.services import ADDRESS, NODE_PORT, Flags, Frontend, frontend_kind, service_name
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import BackendCounters, ServiceCounters
from ebpflb.model import endpoints, hand_over
from ebpflb.model.addresses import Family, host_port
from ebpflb.model.annotations import PASSTHROUGH, RANDOM, show_on_removal
from ebpflb.model.endpoint_slices import StoredSlice
from ebpflb.model.endpoints import NONE_SET_ASIDE, LeftOut, SetAside, Topology, UnusedReason, select
from ebpflb.model.events import Key
from ebpflb.model.services import PortName, Protocol, ServicePort
from ebpflb.plan.desired import NODE_LOCAL, WITHHELD, DesiredBackend, DesiredService
from ebpflb.plan.planner import Planner
from ebpflb.plan.service_entries import ServiceEntries
from ebpflb.plan.tables import scheduler_of

USED, DRAINING, UNUSED = "used", "draining", "not used"
SOCKETS_ONLY = "for all sockets on this node while it answers (ebpflb.io/node-local)"
NOT_ALL_LISTS = "the agent has not received all lists yet"
_POLICIES = {True: "Local", False: "Cluster"}


class FrontendRow(msgspec.Struct):
    """An address and port; ``problem`` says why it serves nothing, "" if it serves."""

    kind: str
    frontend: str
    policy: str
    endpoints: int = 0  # of the list that its policy uses
    problem: str = ""


class EndpointRow(msgspec.Struct):
    """An endpoint of a service port, or the endpoint that its slot still holds.

    Shares are the chance of a new connection, from 0 to 1, under each policy; None means the
    endpoint is not in that list, or no frontend uses the list. ``reason`` says why the endpoint is
    not used, ``not_local`` why not under policy Local.
    """

    endpoint: str
    node: str
    pod: str
    state: str  # one of USED, DRAINING and UNUSED
    id: int = 0  # of the backend; 0: no slot
    share: float | None = None
    local_share: float | None = None
    weight: int | None = None  # determines its share
    reason: str = ""
    not_local: str = ""
    open: int | None = None  # connections, where they are counted
    opened: int | None = None


class PortPage(msgspec.Struct):
    """One service port; ``id`` is 0 if the maps have no entry for it."""

    port: str
    family: str
    protocol: str
    id: int
    affinity_seconds: int
    frontends: list[FrontendRow]
    endpoints: list[EndpointRow]
    scheduler: str = RANDOM
    on_removal: str = ""  # as in the annotation
    problem: str = ""  # why the maps differ from the Service
    counters: dict[str, int] = {}


class LeftOutRow(msgspec.Struct):
    """An entry of a slice that is no endpoint; ``port`` is "" if it concerns no single port."""

    endpoint: str
    node: str
    pod: str
    slice: str
    port: str
    reason: str


class ServicePage(msgspec.Struct):
    """A Service; ``notes`` are sentences about unknown facts, or problems of the whole Service.

    ``type`` is the Service's spec.type, or "" for an invalid Service.
    """

    service: str
    ports: list[PortPage]
    left_out: list[LeftOutRow] = []
    notes: list[str] = []
    type: str = ""

    @property
    def problems(self) -> list[str]:
        """The problems that keep the Service from being served as specified."""
        found = [f"{port.port}: {port.problem}" for port in self.ports if port.problem]
        return found + [
            f"{row.frontend}/{port.port.rpartition('/')[2]}: {row.problem}"
            for port in self.ports
            for row in port.frontends
            if row.problem
        ]


class ServiceRow(msgspec.Struct):
    """A Service in a list; ``backends`` are the ids of the backends in its slots."""

    service: str
    ports: list[str]  # NUMBER/PROTOCOL, or NUMBER:NODEPORT/PROTOCOL
    addresses: list[str]  # where it is reached: cluster IPs, then all others
    policies: list[str]  # of its frontends, without duplicates
    used: int  # pods that are an endpoint of any port, in any family
    unused: int  # other pods
    backends: list[int]
    problems: list[str] = []
    open: int | None = None
    opened: int | None = None


class ServiceList(msgspec.Struct):
    """A list of Services; ``more`` others match too."""

    services: list[ServiceRow]
    more: int = 0
    notes: list[str] = []


def summary(page: ServicePage) -> ServiceRow:
    """Return the page as one row."""
    frontends = [row for port in page.ports for row in port.frontends]
    endpoints = [row for port in page.ports for row in port.endpoints]
    used = {_pod(row) for row in endpoints if row.state == USED}
    unused = {*map(_pod, endpoints), *(row.pod or row.endpoint for row in page.left_out)} - used
    ports = [row for row in frontends if row.kind not in (NODE_PORT, ADDRESS)]
    hosts = [row.frontend.rpartition(":")[0] for row in ports]
    return ServiceRow(
        page.service,
        [*dict.fromkeys(_numbers(port) for port in page.ports if port.frontends)],
        [*dict.fromkeys(hosts)],
        sorted({row.policy for row in frontends}),
        len(used),
        len(unused),
        [row.id for row in endpoints if row.id],
        page.problems,
    )


def _pod(row: EndpointRow) -> str:
    """Return the pod of an endpoint, or the address of one without."""
    return row.pod or row.endpoint.rpartition(":")[0].strip("[]")


def _numbers(port: PortPage) -> str:
    """PORT/PROTOCOL, or PORT:NODEPORT/PROTOCOL."""
    rows = [row for row in port.frontends if row.kind != ADDRESS]
    numbers = {row.kind == NODE_PORT: row.frontend.rpartition(":")[2] for row in rows}
    return f"{':'.join(numbers[it] for it in sorted(numbers))}/{port.protocol}"


def frontend_row(
    frontend: Frontend, flags: Flags, entries: ServiceEntries, problem: str = ""
) -> FrontendRow:
    """Return the row of a frontend; ``problem`` is "" if the maps have the frontend."""
    kind, policy = frontend_kind(frontend, flags), _POLICIES["local" in flags]
    count = sum(policy.lower() in backend.flags for backend in entries.backends)
    if not problem and not count and kind != ADDRESS:
        problem = _without_endpoint(kind, flags)
    if "passthrough" in flags:
        policy = f"{policy}/{PASSTHROUGH}"
    return FrontendRow(kind, str(frontend), policy, count, problem)


def _without_endpoint(kind: str, flags: Flags) -> str:
    """Return the problem of a frontend whose list is empty (kube-proxy.md 6.1, KEP-6272)."""
    passes = "passthrough" in flags
    if "endpoints" not in flags:
        return f"no endpoint: {'packets go on to the router' if passes else 'refused'}"
    if passes:
        return "no endpoint on this node: packets from outside go on to the router"
    return f"no endpoint on this node: dropped{'' if kind == 'ClusterIP' else ' from outside'}"


def _slot_rows(entries: ServiceEntries) -> list[EndpointRow]:
    sizes, used = Counter[str](), entries.used_lists
    for backend in entries.backends:
        sizes.update(dict.fromkeys(backend.flags & used, backend.weight))
    slots = zip(entries.backends, entries.ids, strict=True)
    return [_slot_row(backend, id, sizes) for backend, id in slots]


def _slot_row(backend: DesiredBackend, id: int, sizes: Counter[str]) -> EndpointRow:
    lists = ("cluster", "local")
    share, local = (
        backend.weight / sizes[it] if it in backend.flags and it in sizes else None for it in lists
    )
    return EndpointRow(
        endpoint=host_port(backend.address, backend.port),
        node=backend.name.node,
        pod=backend.name.target,
        state=USED if share or local or "node_local" in backend.flags else DRAINING,
        id=id,
        share=share,
        local_share=local,
        weight=backend.weight,
    )


# The agent's facts about one Service -> its page, with the reason for each unused endpoint.
#
# The reasons come from model/endpoints.py, and from the planner: another service has the address,
# or no space is left.


class PortFacts(NamedTuple):
    """The facts about one service port, as values that do not change any more."""

    port: ServicePort
    desired: DesiredService | None  # None: not planned yet
    entries: ServiceEntries
    owners: Mapping[Frontend, PortName]  # frontend that it wants -> the service port that gets it
    not_programmed: str


class ServiceFacts(NamedTuple):
    key: Key
    ports: tuple[PortFacts, ...]
    slices: tuple[StoredSlice, ...]
    topology: Topology
    notes: tuple[str, ...] = ()
    set_aside: Mapping[PortName, SetAside] = {}


def port_facts(port: ServicePort, planner: Planner) -> PortFacts:
    """Return the planner's current facts; must be called by the thread that plans."""
    desired = planner.claims.desired.get(port.name)
    frontends = desired.frontends if desired else ()
    return PortFacts(
        port,
        desired,
        planner.entries(port.name),
        {each: planner.claims.claimants[each][0] for each in frontends},
        planner.lacks(port.name),
    )


def make_service_page(facts: ServiceFacts) -> ServicePage:
    """Return the whole page, in the order of ports and of the endpoints' addresses."""
    ports = [each.port for each in facts.ports]
    return ServicePage(
        str(facts.key),
        [_port_page(each, facts) for each in facts.ports],
        [_left_out_row(each) for each in endpoints.left_out(facts.slices, ports)],
        [*facts.notes, *_hand_overs(facts)],
        ports[0].type if ports else "",
    )


def _hand_overs(facts: ServiceFacts) -> Iterator[str]:
    """Yield where packets go that come in here; with a family before it if they differ."""
    said = dict.fromkeys((each.port.name.family for each in facts.ports), "")
    for each in facts.ports:
        handed_to = each.desired.handed_to if each.desired else None
        text = hand_over.says(each.port, handed_to, facts.topology.node, facts.slices)
        said[each.port.name.family] = text or said[each.port.name.family]
    differ = len({*said.values()}) > 1
    its = (f"{family}: {text}" if differ else text for family, text in said.items() if text)
    yield from dict.fromkeys(its)


def _port_page(facts: PortFacts, service: ServiceFacts) -> PortPage:
    port, entries = facts.port, facts.entries
    programmed = {frontend: it.flags for frontend, it in entries.services.items()}
    return PortPage(
        service_name(port.name, entries.id),
        str(Family(port.name.family)),
        Protocol(port.name.protocol).name,
        entries.id,
        port.affinity_seconds,
        [*_frontend_rows(facts, programmed)],
        [*_endpoint_rows(facts, service, _slot_rows(entries))],
        scheduler_of(next(iter(programmed.values()), frozenset())),
        show_on_removal(port.reset_after),
        _no_space(facts),
    )


def _frontend_rows(facts: PortFacts, programmed: Mapping[Frontend, Flags]) -> Iterator[FrontendRow]:
    """Yield what the port wants; before it is planned, what the maps have."""
    if facts.desired is None:
        for frontend, flags in programmed.items():
            yield frontend_row(frontend, flags, facts.entries)
        return
    for frontend, flags in facts.desired.frontends.items():
        if frontend.port or facts.owners[frontend] == facts.port.name:
            missing = _missing_frontend(frontend, facts)
            yield frontend_row(frontend, flags, facts.entries, missing)
    for frontend, flags in facts.desired.withheld.items():
        yield frontend_row(frontend, flags, facts.entries, WITHHELD)


def _endpoint_rows(
    facts: PortFacts, service: ServiceFacts, slots: list[EndpointRow]
) -> Iterator[EndpointRow]:
    """Yield every endpoint of the slices, then the other endpoints that the slots still hold."""
    topology, port = service.topology, facts.port
    set_aside = service.set_aside.get(port.name, NONE_SET_ASIDE)
    found = endpoints.merge(service.slices, port.name, topology.node, set_aside)
    selected = select(found, topology)
    usable = endpoints.usable(port, selected)
    others = {row.endpoint: row for row in slots}
    for use in endpoints.uses(port, found, selected, topology):
        each = use.endpoint
        name = host_port(each.address, each.port)
        row = others.pop(name, None) or EndpointRow(name, each.name.node, each.name.target, UNUSED)
        if row.state == USED:
            row.not_local = use.not_in_local or ""
        else:
            reason = use.not_in_cluster or use.not_in_local or ""
            row.reason = _not_programmed(facts) if id(each) in usable else reason
        yield row
    if listener := port.node_local:
        yield _listener_row(others, host_port(listener, port.port))
    for row in others.values():
        row.reason = UnusedReason.GONE
        yield row


def _listener_row(others: dict[str, EndpointRow], name: str) -> EndpointRow:
    """Return the row of a node-local listener, whose slot is taken from ``others``."""
    row = others.pop(name, None)
    if row is None:
        return EndpointRow(name, "", NODE_LOCAL, UNUSED, reason=UnusedReason.LISTENER_SILENT)
    row.reason = SOCKETS_ONLY
    return row


def _no_space(facts: PortFacts) -> str:
    """Say which map has no space left for the service port; "" if it fits."""
    return f"{UnusedReason.NO_SPACE}: {facts.not_programmed}" if facts.not_programmed else ""


def _not_programmed(facts: PortFacts) -> str:
    """Say why a selected endpoint has no slot."""
    if facts.not_programmed:
        return _no_space(facts)
    if facts.desired and facts.port.name not in facts.owners.values():
        owners = sorted({str(name.owner) for name in facts.owners.values()})
        return f"{UnusedReason.CLAIMED}: {', '.join(owners)}"
    return UnusedReason.NOT_WRITTEN


def _missing_frontend(frontend: Frontend, facts: PortFacts) -> str:
    owner = facts.owners[frontend]
    if owner != facts.port.name:
        return f"Service {owner.owner} has it"
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


# The counters of the programs, from the maps.


def count(page: ServicePage, maps: Mapping[str, Map]) -> None:
    """Add the counters of the service ports, and the connections of endpoints."""
    for port in page.ports:
        if port.id:
            port.counters = ServiceCounters(*maps["service_stats"].get(port.id))._asdict()
        counts = _connections(maps, (row.id for row in port.endpoints if row.id))
        for row in port.endpoints:
            if row.id:
                row.opened, row.open = counts[row.id]


def count_rows(rows: list[ServiceRow], maps: Mapping[str, Map]) -> None:
    """Add the connections of Services."""
    counts = _connections(maps, (backend for row in rows for backend in row.backends))
    for row in rows:
        own = [counts[backend] for backend in row.backends]
        row.opened, row.open = (sum(column) for column in zip((0, 0), *own, strict=True))


def _connections(maps: Mapping[str, Map], backends: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return opened and open connections of sockets; with least-connections also those of
    packets.
    """
    found, loads = {}, maps["backend_loads"]
    for id, counts in maps["backend_stats"].get_many({*backends}).items():
        counters, counted = BackendCounters(*counts), loads.get(id).open
        found[id] = counters.opened, max(counted, counters.opened - counters.closed, 0)
    return found
