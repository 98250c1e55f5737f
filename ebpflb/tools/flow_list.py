# SPDX-License-Identifier: Apache-2.0
"""Lists and deletes the flows of the flow tables and of conntrack, as `conntrack -L` and `-D` do.

A flow has two to four entries in the map and one row in the list. A flow whose entry for the
client's requests was evicted by the LRU has the state "partial"; its row shows the other entries.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from ebpflb.entries.flows import (
    Connection,
    Ends,
    Entries,
    Flow,
    FlowKind,
    Tuple,
    between_hooks,
    gather,
    is_client_request,
    request_tuple,
    reverse,
    state,
)
from ebpflb.entries.services import (
    Backend,
    BackendName,
    Frontend,
    protocol_name,
    service_name,
)
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.readers import FrontendKeys
from ebpflb.kernel.maps.sweep import FLOW_MAPS, FlowTable
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model.addresses import Address, host_port
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import PortName
from ebpflb.tools.snapshot import Row, seconds_since, services_at

PARTIAL = "partial"


class FlowFilter(NamedTuple):
    """The wanted flows: of a service (namespace, name) and of a client; None means all."""

    service: tuple[str, str] | None = None
    client: Address | None = None


class FlushResult(NamedTuple):
    """The numbers of deleted flows and of their entries."""

    flows: int
    entries: int


def list_flows(maps: Mapping[str, Map], only: FlowFilter) -> list[Row]:
    """Return a row for each flow that matches."""
    services = dict(maps["service_names"].items())
    name_of = cache(maps["backend_names"].get)
    return [
        _flow_row(entries, services, name_of(next(iter(entries.values())).backend))
        for table in FLOW_MAPS
        for entries in _matching(maps, table, only)
    ]


def flush_flows(maps: Mapping[str, Map], only: FlowFilter) -> FlushResult:
    """Delete all entries of the flows that match; the entry for a flow's requests goes first.

    The entries are counted as swept before they are deleted. Otherwise a sweep at the same time
    would count them as evicted.
    """
    matching = {name: list(_matching(maps, name, only)) for name in FLOW_MAPS}
    entries = 0
    for name, flows in matching.items():
        keys = [key for flow in flows for key in flow]
        table = FlowTable(maps, name)
        table.count(len(keys))
        deleted = maps[name].delete(keys)
        table.count(deleted - len(keys))
        entries += deleted
    return FlushResult(sum(map(len, matching.values())), entries)


def _matching(maps: Mapping[str, Map], table: str, only: FlowFilter) -> Iterator[Entries]:
    names: dict[int, PortName] = dict(maps["service_names"].items())
    services = {id_ for id_, name in names.items() if name.owner == only.service}
    store: Entries = dict(maps[table].items())
    for key, flow in store.items():
        if only.client not in (None, between_hooks(key, flow).source):
            continue
        if only.service is None or flow.service in services:
            entries = gather(key, flow, store.get)
            if next(iter(entries)) == key:
                yield entries


def _flow_row(
    entries: Entries, services: Mapping[int, PortName], backend: BackendName | None
) -> Row:
    key, first = next(iter(entries.items()))
    inside = between_hooks(key, first)
    stands = state(key.protocol, entries.values())
    last_seen = max(flow.last_seen for flow in entries.values())
    return {
        "protocol": protocol_name(key.protocol),
        "state": str(stands) if is_client_request(first) else PARTIAL,
        "service": service_name(services.get(first.service), first.service),
        **_request_columns(key, first, inside, entries.get(reverse(inside))),
        "backend": host_port(inside.destination, inside.destination_port),
        "pod": backend.target if backend else "",
        "node": backend.node if backend else "",
        **_reply_columns(inside, entries.get(inside)),
        "age_seconds": seconds_since(first.created),
        "idle_seconds": seconds_since(last_seen),
        "engine": str(Engine.FLOWS),
    }


def _request_columns(key: Tuple, first: Flow, inside: Tuple, reply: Flow | None) -> Row:
    """Return client and frontend from the entry for requests or for replies; if both are missing,
    only the client.
    """
    known = request_tuple(reverse(inside), reply) if reply else None
    request = key if is_client_request(first) else known
    if request is None:
        return {"client": host_port(inside.source, inside.source_port), "frontend": ""}
    return {
        "client": host_port(request.source, request.source_port),
        "frontend": host_port(request.destination, request.destination_port),
    }


def _reply_columns(inside: Tuple, masquerade: Flow | None) -> Row:
    """Return the client's address as the backend sees it, and the path of the backend's packets."""
    client = host_port(inside.source, inside.source_port)
    backend = host_port(inside.destination, inside.destination_port)
    if masquerade is None:
        return {"masqueraded_as": "", "reply": f"{backend} > {client}"}
    if masquerade.kind == FlowKind.SNAT_PENDING:
        return {"masqueraded_as": "not chosen yet", "reply": ""}
    node = host_port(masquerade.address, masquerade.port)
    return {"masqueraded_as": node, "reply": f"{backend} > {node}"}


# Flows in conntrack, joined with services and backends: listed and deleted.
#
# A translated entry whose original destination is a frontend is a flow. An entry does not tell who
# made it, so entries of a kube-proxy that serves, or has served, the same frontend are among them.
# The flows of a deleted service are not, because its frontends are gone.


class _Service(NamedTuple):
    """A service port: its id, and the backends in its slots by address and port."""

    id: int
    name: PortName | None
    backends: Mapping[tuple[Address, int], Backend]


class _Joined(NamedTuple):
    """An entry whose original destination is a frontend, and the service there."""

    entry: Connection
    service: _Service

    def matches(self, only: FlowFilter) -> bool:
        if only.client not in (None, self.entry.original.source):
            return False
        name = self.service.name
        return only.service is None or bool(name and name.owner == only.service)


def list_connections(maps: Mapping[str, Map], only: FlowFilter) -> list[Row]:
    """Return a row for each flow that matches, with the columns of ``list_flows``. Raises
    NodeError.

    conntrack does not record the age of an entry or its last use: these are None.
    """
    name_of = cache(maps["backend_names"].get)
    return [_connection_row(flow, name_of) for flow in _flows(maps, only)]


def flush_connections(maps: Mapping[str, Map], only: FlowFilter) -> FlushResult:
    """Delete the entries of the flows that match. Raises NodeError."""
    deleted = conntrack.delete(flow.entry for flow in _flows(maps, only))
    return FlushResult(deleted, deleted)


def _flows(maps: Mapping[str, Map], only: FlowFilter) -> Iterator[_Joined]:
    return (each for each in _joined(maps) if each.entry.is_translated and each.matches(only))


def _joined(maps: Mapping[str, Map]) -> Iterator[_Joined]:
    find = cache(lambda frontend: _find(maps, frontend))
    for entry in conntrack.connections(FrontendKeys(maps)):
        _, destination, _, port = entry.original
        service = find(Frontend(destination, port, entry.protocol))
        if service is not None:
            yield _Joined(entry, service)


def _find(maps: Mapping[str, Map], frontend: Frontend) -> _Service | None:
    """Return the service of this frontend, or None if it was removed since its key was read."""
    found = next(services_at(maps, frontend), None)
    if found is None:
        return None
    base, size = found.block
    slots = (maps["slots"].get(slot) for slot in range(base, base + size))
    backends = {(b.address, b.port): b for b in slots if b.service == found.id}
    return _Service(found.id, maps["service_names"].get(found.id), backends)


def _connection_row(flow: _Joined, name_of: Callable[[int], BackendName | None]) -> Row:
    entry, service = flow
    client, frontend, client_port, frontend_port = entry.original
    address, seen_as, port, seen_as_port = entry.reply
    backend = service.backends.get((address, port))
    name = backend and name_of(backend.id)
    return {
        "protocol": entry.protocol.name,
        "state": str(entry.state),
        "service": _name(service),
        "client": host_port(client, client_port),
        "frontend": host_port(frontend, frontend_port),
        "backend": host_port(address, port),
        "pod": name.target if name else "",
        "node": name.node if name else "",
        "masqueraded_as": "" if seen_as == client else host_port(seen_as, seen_as_port),
        "reply": _ends(entry.reply),
        "age_seconds": None,
        "idle_seconds": None,
        "engine": str(Engine.NETFILTER),
    }


def _name(service: _Service) -> str:
    return service_name(service.name, service.id)


def _ends(ends: Ends) -> str:
    source = host_port(ends.source, ends.source_port)
    return f"{source} > {host_port(ends.destination, ends.destination_port)}"
