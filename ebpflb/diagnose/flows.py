# SPDX-License-Identifier: Apache-2.0
"""The flows through the packet path, one row each however many entries, and their end on request.

They are for our flows what `conntrack -L` and `-D` are for netfilter's. A flow is found by its
client's request; one that the LRU has robbed of that is only in the dump.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from ebpflb.datapath.maps import Map
from ebpflb.datapath.sweep import PROTOCOLS, FlowTable
from ebpflb.diagnose.content import Row, host_port, seconds_since, spelled
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.entries import BackendName
from ebpflb.plan.flows import Entries, Flow, Tuple, asks, gather, middle, state


class Choice(NamedTuple):
    """Which flows: those of a service (namespace, name), of a client; None: any."""

    service: tuple[str, str] | None = None
    client: Address | None = None


class Flushed(NamedTuple):
    """How many have been deleted."""

    flows: int
    entries: int


def listed(maps: Mapping[str, Map], choice: Choice) -> list[Row]:
    """A row for each chosen flow, sorted by service and client."""
    services = dict(maps["service_names"].items())
    name_of = cache(maps["backend_names"].get)
    rows = [
        _row(entries, services, name_of(next(iter(entries.values())).backend))
        for table in PROTOCOLS
        for entries in _chosen(maps, table, choice)
    ]
    return sorted(rows, key=lambda row: (row["service"], row["client"], row["frontend"]))


def flush(maps: Mapping[str, Map], choice: Choice) -> Flushed:
    """Deletes all entries of the chosen flows, their requests' first; they count as swept."""
    gone = {
        name: [sum(maps[name].take(key) is not None for key in entries) for entries in chosen]
        for name, chosen in ((name, _chosen(maps, name, choice)) for name in PROTOCOLS)
    }
    for name, entries in gone.items():
        FlowTable(maps, name).count(sum(entries))
    return Flushed(sum(map(len, gone.values())), sum(map(sum, gone.values())))


def _chosen(maps: Mapping[str, Map], table: str, choice: Choice) -> Iterator[Entries]:
    names: dict[int, PortName] = dict(maps["service_names"].items())
    services = {
        id_ for id_, name in names.items() if (name.namespace, name.service) == choice.service
    }
    for key, flow in maps[table].items():
        if not asks(key, flow) or choice.client not in (None, key.source):
            continue
        if choice.service is None or flow.service in services:
            yield gather(key, flow, maps[table].get)


def _row(entries: Entries, services: Mapping[int, PortName], backend: BackendName | None) -> Row:
    key, request = next(iter(entries.items()))
    inside = middle(key, request)
    answer = _answer(inside, entries.get(inside))
    last_seen = max(flow.last_seen for flow in entries.values())
    return {
        "protocol": Protocol(key.protocol).name,
        "state": str(state(key.protocol, [flow.flags for flow in entries.values()])),
        "service": spelled(services.get(request.service), request.service),
        "client": host_port(key.source, key.source_port),
        "frontend": host_port(key.destination, key.destination_port),
        "backend": host_port(request.address, request.port),
        "pod": backend.target if backend else "",
        "node": backend.node if backend else "",
        **answer,
        "age_seconds": seconds_since(request.created),
        "idle_seconds": seconds_since(last_seen),
    }


def _answer(inside: Tuple, masquerade: Flow | None) -> Row:
    """As whom the backend sees the client, and its packets as they come back here."""
    client = host_port(inside.source, inside.source_port)
    backend = host_port(inside.destination, inside.destination_port)
    if masquerade is None:
        return {"masqueraded_as": "", "reply": f"{backend} > {client}"}
    if not masquerade.port:
        return {"masqueraded_as": "not chosen yet", "reply": ""}
    node = host_port(masquerade.address, masquerade.port)
    return {"masqueraded_as": node, "reply": f"{backend} > {node}"}
