# SPDX-License-Identifier: Apache-2.0
"""Flows that conntrack keeps, joined with services and backends: listed, deleted, and dumped.

A flow of ours is an entry that is translated and whose original destination is a frontend. An entry
does not tell who made it: those of a kube-proxy that serves, or has served, the same frontend are
among them. Flows of a service that has been deleted since are not known by any frontend.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.frontend_keys import FrontendKeys
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model.addresses import Address, family
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import PortName
from ebpflb.plan.desired import ANY
from ebpflb.plan.entries import (
    Backend,
    BackendName,
    Frontend,
    ServiceEntry,
    host_port,
    service_name,
)
from ebpflb.plan.flow_entries import STATUS, Connection, Ends
from ebpflb.tools.flow_list import FlowFilter, FlushResult
from ebpflb.tools.snapshot import Row


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
        return only.service is None or bool(name and (name.namespace, name.service) == only.service)


def list_connections(maps: Mapping[str, Map], only: FlowFilter) -> list[Row]:
    """A row for each flow that matches, with the columns of ``list_flows``. Raises NodeError.

    conntrack does not tell how old an entry is, nor when it was last used: these are None.
    """
    name_of = cache(maps["backend_names"].get)
    return [_row(flow, name_of) for flow in _flows(maps, only)]


def flush_connections(maps: Mapping[str, Map], only: FlowFilter) -> FlushResult:
    """Deletes the entries of the flows that match. Raises NodeError."""
    deleted = conntrack.delete(flow.entry for flow in _flows(maps, only))
    return FlushResult(deleted, deleted)


def dump_connections(maps: Mapping[str, Map]) -> list[Row]:
    """Every entry to a frontend as conntrack shows it, also those that are not translated."""
    joined = sorted(_joined(maps), key=lambda one: (one.service.id, one.entry.original))
    return [
        {
            "protocol": entry.protocol.name,
            "state": entry.state_name,
            "service": _name(service),
            "original": _ends(entry.original),
            "reply": _ends(entry.reply),
            "status": " ".join(word for word, bit in STATUS.items() if entry.status & bit),
            "mark": f"{entry.mark:#x}",
            "expires_seconds": entry.seconds,
        }
        for entry, service in joined
    ]


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
    """None where it has gone since its key was read."""
    services, anywhere = maps["services"], ANY[family(frontend.address)]
    found: ServiceEntry | None = services.get(frontend)
    found = found or services.get(frontend._replace(address=anywhere))
    if found is None:
        return None
    base, size = found.block
    slots = (maps["slots"].get(slot) for slot in range(base, base + size))
    backends = {(b.address, b.port): b for b in slots if b.service == found.id}
    return _Service(found.id, maps["service_names"].get(found.id), backends)


def _row(flow: _Joined, name_of: Callable[[int], BackendName | None]) -> Row:
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
