# SPDX-License-Identifier: Apache-2.0
"""Every map as rows for the operator: with names instead of ids, and with counters.

The agent may write while the maps are read. It counts its writes (the count is odd during a
write), so the dump can tell whether its rows may be of two states.
"""

import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ebpflb.entries.flows import Flow, FlowKind, Hook
from ebpflb.entries.services import (
    Backend,
    BackendName,
    Chosen,
    Prefix,
    Range,
    frontend_kind,
    protocol_name,
)
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import VERDICTS, address_bytes
from ebpflb.kernel.maps.readers import RememberedSockets
from ebpflb.kernel.maps.records import HalfOpen, PeerFrontend
from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.kernel.node.namespaces import own_cookie
from ebpflb.model.addresses import Address, Family, host_port
from ebpflb.model.services import Protocol
from ebpflb.plan.tables import scheduler_of
from ebpflb.tools.snapshot import Row, Snapshot, seconds_since

_FLOW_NUMBERS = 1 << 63  # bpf/engine/flows/count.h
_HOOKS = {int(hook): hook.name.lower() for hook in Hook}
_RANGE_OF = {0: "load balancer", 1: "nodeport"}
_SERVICE_BITS = 64  # of a source range's length
_DEVICE_BITS = 32  # of a route key's

Rows = Callable[[Snapshot], Iterable[Row]]
Each = Callable[[Snapshot, Any, Any], Row]
"""From a key and its value to their row."""


class Dump(NamedTuple):
    """Rows by map, and whether the agent wrote during the dump."""

    maps: dict[str, list[Row]]
    changed_while_reading: bool


def dump_maps(maps: Mapping[str, Map], names: tuple[str, ...] = ()) -> Dump:
    """Return the sorted rows of the maps with these names, or of all maps."""
    before = maps["settings"].get(0).writes
    snapshot = Snapshot(maps)
    rows = {name: list(ROWS[name](snapshot)) for name in names or ROWS}
    after = maps["settings"].get(0).writes
    return Dump(rows, changed_while_reading=before != after or bool(before % 2))


def _entries(name: str, row: Each, order: Callable[[Any], Any] = repr) -> Rows:
    """Return a function that makes a row for each entry of a map, sorted by its key in this
    order.
    """

    def rows(s: Snapshot) -> Iterable[Row]:
        entries = sorted(s.maps[name].items(), key=lambda entry: order(entry[0]))
        return (row(s, key, value) for key, value in entries)

    return rows


def _sorted(rows: Iterable[Row], *by: str) -> list[Row]:
    return sorted(rows, key=lambda row: [row[name] for name in by])


def _slot_range(slots: Range) -> str:
    return f"{slots.base}-{slots.base + slots.size - 1}" if slots.size else "none"


def _services(s: Snapshot) -> list[Row]:
    rows = (
        {
            "service": s.service(service.id),
            "kind": frontend_kind(frontend, service.flags),
            "frontend": str(frontend),
            "id": service.id,
            "cluster_slots": _slot_range(service.cluster),
            "local_slots": _slot_range(service.local),
            "scheduler": scheduler_of(service.flags),
            "tables": _slot_range(service.tables),
            "policy": "Local" if "local" in service.flags else "Cluster",
            "has_endpoints": "endpoints" in service.flags,
            "affinity_seconds": service.affinity_seconds,
            **s.service_counters(service.id),
        }
        for frontend, service in s.services.items()
    )
    return _sorted(rows, "service", "kind", "frontend")


def _backend(s: Snapshot, backend: Backend) -> Row:
    name = s.backend_names.get(backend.id, BackendName("", ""))
    return {
        "service": s.service(backend.service),
        "endpoint": host_port(backend.address, backend.port),
        "node": name.node,
        "target": name.target,
        "id": backend.id,
    }


def _slots(s: Snapshot) -> Iterable[Row]:
    for slot, backend in sorted(s.slots.items()):
        yield {
            "slot": slot,
            **_backend(s, backend),
            "selected_for": " ".join(sorted(backend.flags)) or "none, draining",
            "weight": backend.weight,
            **s.backend_counters(backend.id),
        }


def _choices(s: Snapshot) -> Iterable[Row]:
    """Yield the places of the tables from which services draw endpoints."""
    services = {it.tables: it for it in s.services.values() if it.table.size}
    for tables, service in sorted(services.items()):
        for at in range(tables.base, sum(tables)):
            yield {
                "place": at,
                "service": s.service(service.id),
                **s.maps["choices"].get(at)._asdict(),
            }


def _address(s: Snapshot, at: Any, _: Any) -> Row:
    return {"address": str(at)}


def _affinity(s: Snapshot, client: Any, entry: Any) -> Row:
    return {
        "client": "" if client.netns else str(client.address),
        "netns": client.netns or None,
        "service": s.service(client.service),
        "endpoint": s.endpoint(entry.backend),
        "idle_seconds": seconds_since(entry.last_used),
    }


def _backend_health(s: Snapshot, key: Any, it: Any) -> Row:
    return {
        "service": s.service(key.service),
        "endpoint": s.endpoint(key.backend),
        "clients_failed": sum(map(bool, (it.first, it.second, it.third))),
        "first_failed_seconds": seconds_since(it.since) if it.first else None,
        "has_opened": bool(it.has_opened),
        "id": key.backend,
    }


def _sockets(s: Snapshot) -> Iterable[Row]:
    for cookie, entry in sorted(RememberedSockets(s.maps).items(), key=str):
        if entry.peer.frontend.port:  # sockets without a port have ended, and are not released yet
            yield {**_peer(s, cookie, entry.peer), "counted": bool(entry.counted)}


def _peer(s: Snapshot, cookie: int, remembered: PeerFrontend) -> Row:
    service = s.services.get(remembered.frontend)
    return {
        "socket": cookie,
        "frontend": str(remembered.frontend),
        "protocol": protocol_name(remembered.frontend.protocol),
        "peer": host_port(remembered.address, remembered.port),
        "service": s.service(service.id) if service else "",
    }


def _flows(name: str) -> Rows:
    """Return a function that makes a row for each entry; the oldest flow is first, entries of a
    flow are together.
    """

    def rows(s: Snapshot) -> Iterable[Row]:
        entries = list(s.maps[name].items())
        entries.sort(key=lambda e: (e[1].created, "request" not in e[1].flags, e[0].hook))
        for key, flow in entries:
            yield {
                **_ends(key),
                "rewritten": _rewritten(key, flow),
                "service": s.service(flow.service),
                "endpoint": s.endpoint(flow.backend),
                "flags": " ".join(sorted(flow.flags)),
                "age_seconds": seconds_since(flow.created),
                "idle_seconds": seconds_since(flow.last_seen),
            }

    return rows


def _way(key: Any) -> Row:
    hook = _HOOKS.get(key.hook, f"hook {key.hook}")
    return {"hook": hook, "protocol": protocol_name(key.protocol)}


def _ends(key: Any) -> Row:
    return {
        **_way(key),
        "source": host_port(key.source, key.source_port),
        "destination": host_port(key.destination, key.destination_port),
    }


def _rewritten(key: Any, flow: Flow) -> str:
    ends = "destination", "source"
    here, there = ends if key.hook == Hook.INGRESS else reversed(ends)
    if flow.kind == FlowKind.SNAT_PENDING:
        return f"{here} not chosen yet"
    other_port = key.source_port if key.hook == Hook.INGRESS else key.destination_port
    also = f", {there} port := {flow.other_port}" if flow.other_port != other_port else ""
    return f"{here} := {host_port(flow.address, flow.port)}{also}"


def _half_open(s: Snapshot) -> Iterable[Row]:
    """Yield the half-open flows, the oldest first.

    Each new flow takes a place, and keeps it when it is established or has ended.
    """
    taken = (place for _, place in s.maps["half_open"].written_items() if place.created)
    for place in sorted(taken, key=lambda it: it.created):
        if _is_half_open(s.maps, place):
            yield {**_ends(place.request), "age_seconds": seconds_since(place.created)}


def _is_half_open(maps: Mapping[str, Map], place: HalfOpen) -> bool:
    """Return what flow_is_half_open returns (bpf/engine/flows/half_open.h)."""
    table = maps["tcp_flows" if place.request.protocol == Protocol.TCP else "other_flows"]
    request: Flow | None = table.get(place.request)
    if request is None or request.created != place.created:
        return False
    if place.request.protocol != Protocol.UDP:
        return "seen" not in request.flags
    reply: Flow | None = table.get(place.reply)
    return reply is not None and "seen" not in reply.flags


def _fragments(s: Snapshot, key: Any, ports: Any) -> Row:
    return {
        **_way(key),
        "source": str(key.source),
        "destination": str(key.destination),
        "id": key.id,
        "source_port": ports.source_port,
        "destination_port": ports.destination_port,
        "idle_seconds": seconds_since(ports.seen),
    }


def _rotations(s: Snapshot) -> Iterable[Row]:
    """Yield the next place in each list of services with round-robin, from 1; 0: none was taken
    yet.
    """
    for id, found in s.maps["rotations"].written_items():
        if found.cluster or found.local:
            yield {"service": s.service(id), "cluster": found.cluster, "local": found.local}


def _connections(s: Snapshot, key: Any, counted: Any) -> Row:
    """Return the row of a connection of a service with least-connections.

    A flow's number is not a socket cookie.
    """
    return {
        "of": "flow" if key.socket >= _FLOW_NUMBERS else "socket",
        "number": key.socket,
        "frontend": str(key.frontend) if key.frontend.port else "",
        "endpoint": s.endpoint(counted.backend),
        "generation": counted.generation,
    }


def _source_ranges(s: Snapshot) -> list[Row]:
    rows = (
        {
            "service": s.service(key.service),
            "of": _RANGE_OF.get(key.nodeport, "nothing"),
            "range": _cidr(key.address, key.length - _SERVICE_BITS),
        }
        for key, _ in s.maps["source_ranges"].items()
    )
    return _sorted(rows, "service", "of", "range")


def _cidr(address: Address, bits: int) -> str:
    return f"{address}/{bits - 96 if address.version == 4 else bits}"


def _cluster_ips(s: Snapshot) -> Iterable[Row]:
    services: dict[Address, set[str]] = {}
    for frontend, service in s.services.items():
        services.setdefault(frontend.address, set()).add(s.service(service.id))
    for at in sorted((address for address, _ in s.maps["cluster_ips"].items()), key=str):
        yield {"address": str(at), "services": " ".join(sorted(services.get(at, ())))}


def _route_sources(s: Snapshot) -> list[Row]:
    rows = (
        {
            "device": _device(s, key.ifindex),
            "index": key.ifindex,
            "range": _cidr(key.destination, key.length - _DEVICE_BITS),
            "source": str(source),
        }
        for key, source in s.maps["route_sources"].items()
    )
    return _sorted(rows, "index", "range")


def _device(s: Snapshot, index: int) -> str:
    """Return the device's name, or its index outside the node's network namespace."""
    if own_cookie() not in (None, s.maps["settings"].get(0).host_netns):
        return str(index)
    try:
        return socket.if_indextoname(index)
    except OSError:
        return "removed"


def _texts(record: Any) -> Row:
    """Return the fields as texts: numbers unchanged, flags as words, "" for an address that is not
    set.
    """
    return {name: _text(value) for name, value in record._asdict().items()}


def _text(value: Any) -> str | int:
    match value:
        case int():
            return value
        case frozenset():
            return " ".join(sorted(value))
        case Prefix(address, mask):
            bits = int.from_bytes(address_bytes(address), "big")
            return "" if bits & ~int(mask) else _cidr(address, int(mask).bit_count())
        case _:
            return "" if value.is_unspecified else str(value)


def _translations(s: Snapshot) -> list[Row]:
    """Return where netfilter sends packets for which a backend was chosen. Raises NodeError."""
    from ebpflb.kernel.netfilter import nft
    from ebpflb.kernel.netfilter.elements import read_backends, unpack
    from ebpflb.kernel.netfilter.table import TABLE

    if not nft.exists(TABLE):
        return []
    backends, names = s.backends(), s.backend_names
    return [
        {
            "service": s.service(backends[id].service) if id in backends else "",
            "endpoint": host_port(*unpack(translated)),
            "target": names[id].target if id in names else "",
            "id": id,
        }
        for id, translated in sorted(read_backends().items())
    ]


# The maps that say what is served and decided. Those of counters, which are columns here or
# metrics, are left out, as are those that only programs use. "translations" has the elements of
# netfilter's table.
ROWS: dict[str, Rows] = {
    "services": _services,
    "slots": _slots,
    "choices": _choices,
    "node_addresses": _entries("node_addresses", _address, order=str),
    "own_addresses": _entries("own_addresses", _address, order=str),
    **{name: _entries(name, _affinity) for name in ("affinity", "new_affinity")},
    "sockets": _sockets,
    "peers": _entries("peers", lambda s, peer, of: _peer(s, peer.socket, of)),
    "assignments": _entries(
        "assignments",
        lambda s, sender, entry: {
            "socket": sender.socket,
            "frontend": str(sender.frontend),
            "service": s.service(entry.service),
            "endpoint": host_port(entry.peer.address, entry.peer.port),
        },
    ),
    "service_clients": _entries(
        "service_clients",
        lambda s, it, _: {"service": s.service(it.service), "client_hash": f"{it.client:#x}"},
        order=tuple,
    ),
    "backend_health": _entries("backend_health", _backend_health, order=tuple),
    **{name: _flows(name) for name in FLOW_MAPS},
    "half_open": _half_open,
    "udp_choices": _entries(  # the choice for the datagrams of each flow on the engine netfilter
        "udp_choices",
        lambda s, key, choice: {
            **_ends(key),
            "service": s.service(choice.service),
            "endpoint": s.endpoint(choice.chosen & Chosen.ID),
            "masquerade": bool(choice.chosen & Chosen.MASQUERADE),
            "idle_seconds": seconds_since(choice.last_used),
        },
    ),
    "attempts": _entries(  # TCP connections of packets without an answer yet
        "attempts",
        lambda s, key, attempt: {
            **_ends(key),
            "service": s.service(attempt.service),
            "endpoint": s.endpoint(attempt.backend),
            "client_hash": f"{attempt.client:#x}",
            "seconds": seconds_since(attempt.since),
            "has_failed": bool(attempt.has_failed),
        },
    ),
    "forwarded": _entries(
        "forwarded",
        lambda s, key, entry: {
            **_ends(key),
            "replied": bool(entry.replied),
            "age_seconds": seconds_since(entry.since),
        },
    ),
    "fragments": _entries("fragments", _fragments),
    "rotations": _rotations,
    "connections": _entries("connections", _connections),
    "backend_loads": lambda s: (
        {"id": id, "endpoint": s.endpoint(id), **s.maps["backend_loads"].get(id)._asdict()}
        for id in sorted(s.backends())
    ),
    "source_ranges": _source_ranges,
    "service_ranges": lambda s: _sorted(
        ({"range": _cidr(key.address, key.length)} for key, _ in s.maps["service_ranges"].items()),
        "range",
    ),
    "cluster_ips": _cluster_ips,
    "link_addresses": _entries("link_addresses", lambda s, mac, _: {"mac": mac}),
    "devices": _entries(
        "devices",
        lambda s, index, device: {
            "device": _device(s, index),
            "index": index,
            **_texts(device),
        },
        order=int,
    ),
    "route_sources": _route_sources,
    "settings": lambda s: [_texts(s.maps["settings"].get(0))],
    "translations": _translations,
    "verdicts": lambda s: (
        {"verdict": name, "count": s.maps["verdicts"].get(number)[0]}
        for number, name in VERDICTS.items()
    ),
    "service_names": lambda s: (
        {"id": number, "service": s.service(number), "family": str(Family(name.family))}
        for number, name in sorted(s.service_names.items())
    ),
    "backend_names": lambda s: (
        {"id": number, **name._asdict()} for number, name in sorted(s.backend_names.items())
    ),
}
