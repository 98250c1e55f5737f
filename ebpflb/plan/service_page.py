# SPDX-License-Identifier: Apache-2.0
"""A Service as the operator sees it: frontends, endpoints with their share, and what is not used.

What is used is what the maps hold (``ServiceEntries``); ``programmed_port`` makes a page of that
alone. Why an endpoint is not used, service_facts.py adds.
"""

from collections import Counter

import msgspec

from ebpflb.model.addresses import Family
from ebpflb.model.scheduler import RANDOM
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.desired_service import DesiredBackend
from ebpflb.plan.entries import Flags, Frontend
from ebpflb.plan.scheduling import scheduler_of
from ebpflb.plan.service_entries import ServiceEntries
from ebpflb.plan.wording import NODE_PORT, frontend_kind, host_port, service_name

USED, DRAINING, UNUSED = "used", "draining", "not used"
NOT_ALL_LISTS = "the agent has not received all lists yet"
_POLICIES = {True: "Local", False: "Cluster"}


class FrontendRow(msgspec.Struct):
    """An address and port; ``problem`` says why it serves nothing, or is "" where it serves."""

    kind: str
    frontend: str
    policy: str
    endpoints: int = 0  # of the list that its policy uses
    problem: str = ""


class EndpointRow(msgspec.Struct):
    """An endpoint of a service port, or what its slot still holds of one.

    Shares are the chance of a new connection, from 0 to 1, under either policy; None: not in that
    list, or no frontend uses it. ``reason`` says why it is not used, ``not_local`` why not under
    policy Local.
    """

    endpoint: str
    node: str
    pod: str
    state: str  # one of USED, DRAINING and UNUSED
    id: int = 0  # of the backend; 0: it has no slot
    share: float | None = None
    local_share: float | None = None
    weight: int | None = None  # by which its share is reckoned
    reason: str = ""
    not_local: str = ""
    open: int | None = None  # connections, where they are counted
    opened: int | None = None


class PortPage(msgspec.Struct):
    """One service port; ``id`` is 0 where the maps have nothing of it."""

    port: str
    family: str
    protocol: str
    id: int
    affinity_seconds: int
    frontends: list[FrontendRow]
    endpoints: list[EndpointRow]
    scheduler: str = RANDOM
    on_removal: str = ""  # as the annotation says it; "": not known, the maps do not tell
    problem: str = ""  # why it is not programmed as it is wanted
    counters: dict[str, int] = {}


class LeftOutRow(msgspec.Struct):
    """An entry of a slice that is no endpoint; ``port`` is "" if it is none of any port."""

    endpoint: str
    node: str
    pod: str
    slice: str
    port: str
    reason: str


class ServicePage(msgspec.Struct):
    """``notes`` are sentences about what is not known, or is wrong with the whole Service."""

    service: str
    ports: list[PortPage]
    left_out: list[LeftOutRow] = []
    notes: list[str] = []

    @property
    def problems(self) -> list[str]:
        """What keeps the Service from being served as it is wanted."""
        found = [f"{port.port}: {port.problem}" for port in self.ports if port.problem]
        return found + [
            f"{row.frontend}: {row.problem}"
            for port in self.ports
            for row in port.frontends
            if row.problem
        ]


class ServiceRow(msgspec.Struct):
    """A Service in a list; ``ids`` are those of its service ports in the maps."""

    service: str
    ports: list[str]  # NUMBER/PROTOCOL, or NUMBER:NODEPORT/PROTOCOL
    addresses: list[str]  # where it is reached: cluster IPs, then all others
    policies: list[str]  # of its frontends, each once
    used: int  # endpoints, of all service ports
    unused: int
    ids: list[int]
    problems: list[str] = []
    open: int | None = None
    opened: int | None = None


class ServiceList(msgspec.Struct):
    """``more`` match and are not in ``services``; all meet ``selector``, one of labels."""

    services: list[ServiceRow]
    more: int = 0
    notes: list[str] = []
    selector: str = ""


def summary(page: ServicePage) -> ServiceRow:
    """The page in one row."""
    frontends = [row for port in page.ports for row in port.frontends]
    states = Counter(row.state for port in page.ports for row in port.endpoints)
    hosts = [row.frontend.rpartition(":")[0] for row in frontends if row.kind != NODE_PORT]
    return ServiceRow(
        page.service,
        [*dict.fromkeys(_numbers(port) for port in page.ports)],
        [*dict.fromkeys(hosts)],
        sorted({row.policy for row in frontends}),
        states[USED],
        states.total() - states[USED] + len(page.left_out),
        [port.id for port in page.ports if port.id],
        page.problems,
    )


def _numbers(port: PortPage) -> str:
    """PORT/PROTOCOL, or PORT:NODEPORT/PROTOCOL."""
    numbers = {row.kind == NODE_PORT: row.frontend.rpartition(":")[2] for row in port.frontends}
    return f"{':'.join(numbers[it] for it in sorted(numbers))}/{port.protocol}"


def programmed_port(name: PortName, entries: ServiceEntries) -> PortPage:
    """A service port by what the maps hold alone."""
    affinity = next((each.affinity_seconds for each in entries.services.values()), 0)
    wanted = {frontend: service.flags for frontend, service in entries.services.items()}
    return PortPage(
        service_name(name, entries.id),
        str(Family(name.family)),
        Protocol(name.protocol).name,
        entries.id,
        affinity,
        [frontend_row(frontend, flags, entries) for frontend, flags in wanted.items()],
        _slot_rows(entries),
        scheduler_of(next(iter(wanted.values()), frozenset())),
    )


def frontend_row(
    frontend: Frontend, flags: Flags, entries: ServiceEntries, problem: str = ""
) -> FrontendRow:
    """``problem`` is empty where the maps have the frontend."""
    kind, policy = frontend_kind(frontend, flags), _POLICIES["local" in flags]
    count = sum(policy.lower() in backend.flags for backend in entries.backends)
    if not problem and not count:
        problem = _without_endpoint(kind) if "endpoints" in flags else "no endpoint: refused"
    return FrontendRow(kind, str(frontend), policy, count, problem)


def _without_endpoint(kind: str) -> str:
    """kube-proxy.md 6.1: under policy Local, while there are endpoints elsewhere."""
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
        state=USED if share or local else DRAINING,
        id=id,
        share=share,
        local_share=local,
        weight=backend.weight,
    )
