# SPDX-License-Identifier: Apache-2.0
"""The flows through the packet path, one row each however many entries, and their end on request.

They are for our flows what `conntrack -L` and `-D` are for netfilter's. A flow that the LRU has
robbed of the entry for its client's requests is an orphan: what is left of it is a row too.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.sweep import PROTOCOLS, FlowTable
from ebpflb.diagnose.content import Row, host_port, seconds_since, spelled
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.entries import BackendName
from ebpflb.plan.flow_entries import Entries, Flow, Tuple, asked, asks, back, gather, middle, state

ORPHAN = "orphan"


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
    """Deletes all entries of the chosen flows, their requests' first.

    They count as swept, and do before they go: a sweep meanwhile would take them for evicted.
    """
    chosen = {name: list(_chosen(maps, name, choice)) for name in PROTOCOLS}
    entries = 0
    for name, flows in chosen.items():
        keys = [key for flow in flows for key in flow]
        table = FlowTable(maps, name)
        table.count(len(keys))
        missing = sum(maps[name].pop(key) is None for key in keys)
        table.count(-missing)
        entries += len(keys) - missing
    return Flushed(sum(map(len, chosen.values())), entries)


def _chosen(maps: Mapping[str, Map], table: str, choice: Choice) -> Iterator[Entries]:
    names: dict[int, PortName] = dict(maps["service_names"].items())
    services = {
        id_ for id_, name in names.items() if (name.namespace, name.service) == choice.service
    }
    every: Entries = dict(maps[table].items())
    for key, flow in every.items():
        if choice.client not in (None, middle(key, flow).source):
            continue
        if choice.service is None or flow.service in services:
            entries = gather(key, flow, every.get)
            if next(iter(entries)) == key:
                yield entries


def _row(entries: Entries, services: Mapping[int, PortName], backend: BackendName | None) -> Row:
    key, first = next(iter(entries.items()))
    inside, protocol = middle(key, first), Protocol(key.protocol)
    stands = state(protocol, [flow.flags for flow in entries.values()])
    last_seen = max(flow.last_seen for flow in entries.values())
    return {
        "protocol": protocol.name,
        "state": str(stands) if asks(key, first) else ORPHAN,
        "service": spelled(services.get(first.service), first.service),
        **_question(key, first, inside, entries.get(back(inside))),
        "backend": host_port(inside.destination, inside.destination_port),
        "pod": backend.target if backend else "",
        "node": backend.node if backend else "",
        **_answer(inside, entries.get(inside)),
        "age_seconds": seconds_since(first.created),
        "idle_seconds": seconds_since(last_seen),
    }


def _question(key: Tuple, first: Flow, inside: Tuple, reply: Flow | None) -> Row:
    """Who asked whom: by the request, or by the reply; else only the client is known."""
    asking = key if asks(key, first) else asked(back(inside), reply) if reply else None
    if asking is None:
        return {"client": host_port(inside.source, inside.source_port), "frontend": ""}
    return {
        "client": host_port(asking.source, asking.source_port),
        "frontend": host_port(asking.destination, asking.destination_port),
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
