# SPDX-License-Identifier: Apache-2.0
"""Every map as rows for the operator: with names instead of ids, and with counters.

The agent may write while the maps are read. It counts its writes (the count is odd during a write),
so the dump can tell whether its rows may mix two states.
"""

import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ebpflb.entries.flows import FlowKind, Hook
from ebpflb.entries.services import (
    BackendName,
    Chosen,
    Frontend,
    Prefix,
    Range,
    ServiceEntry,
    frontend_kind,
    id_of,
    protocol_name,
)
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import VERDICTS, address_bytes
from ebpflb.kernel.maps.readers import RememberedSockets
from ebpflb.kernel.maps.service_places import unpacked
from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.kernel.node.namespaces import own_cookie
from ebpflb.model.addresses import Address, Family, host_port
from ebpflb.plan.tables import scheduler_of
from ebpflb.tools.snapshot import Row, Snapshot, seconds_since

Rows = Callable[[Snapshot], Iterable[Row]]


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


# A key or a value as columns: the fields of its struct, with names for ids, ages for times, and an
# address with its port as one text. Fields that only the programs need are left out.

_PORTS = {"address": "port", "source": "source_port", "destination": "destination_port"}
_AGES = {
    **dict.fromkeys(("created", "since"), "age_seconds"),
    **dict.fromkeys(("last_seen", "last_used", "seen"), "idle_seconds"),
}
_INTERNAL = {
    *("connection", "packets", "frontend_moves", "end", "acknowledged", "asked"),
    *("is_connected", "hops"),
}
_ENUMS = {
    "hook": {int(it): it.name.lower() for it in Hook},
    "kind": {int(it): it.name.lower().replace("_", "-") for it in FlowKind},
}


def _cells(s: Snapshot, record: Any) -> Row:
    fields, row = record._asdict(), dict[str, Any]()
    if "length" in fields:  # of a longest-prefix match: it counts the 32 bits of other fields too
        length, (_, address) = fields.pop("length"), fields.popitem()
        fields["range"] = _cidr(address, length - 32 * len(fields))
    for name, port in _PORTS.items():
        if name in fields and port in fields:
            fields[name] = host_port(fields[name], fields.pop(port))
    for name, value in fields.items():
        row |= _cell(s, name, value)
    return row


def _cell(s: Snapshot, name: str, value: Any) -> Row:
    match name:
        case "service":
            return {name: s.service(value)}
        case "backend":
            return {"endpoint": s.endpoint(value)}
        case "chosen":
            masquerade = bool(value & Chosen.MASQUERADE)
            return {"endpoint": s.endpoint(id_of(value)), "masquerade": masquerade}
        case "frontend":
            return _frontend(s, value)
        case "client":
            return {"client_hash": f"{value:#x}"}
        case "protocol":
            return {name: protocol_name(value)}
        case "ifindex":
            return {"device": _device(s, value)}
        case "hook" | "kind":
            return {name: _ENUMS[name].get(value, f"{name} {value}")}
    if name in _AGES:
        return {_AGES[name]: seconds_since(value) if value else None}
    return {} if name in _INTERNAL else {name: _text(value)}


def _frontend(s: Snapshot, frontend: Frontend) -> Row:
    service = s.services.get(frontend)
    return {
        "frontend": str(frontend) if frontend.port else "",
        "protocol": protocol_name(frontend.protocol) if frontend.port else "",
        "service": s.service(service.id) if service else "",
    }


def _text(value: Any) -> str | int:
    """Return numbers unchanged, flags as words, "" for an address that is not set."""
    match value:
        case int() | str():
            return value
        case frozenset():
            return " ".join(sorted(value))
        case Prefix(address, mask):
            bits = int.from_bytes(address_bytes(address), "big")
            return "" if bits & ~int(mask) else _cidr(address, int(mask).bit_count())
        case _:
            return "" if value.is_unspecified else str(value)


def _texts(record: Any) -> Row:
    return {name: _text(value) for name, value in record._asdict().items()}


def _cidr(address: Address, bits: int) -> str:
    return f"{address}/{bits - 96 if address.version == 4 else bits}"


def _device(s: Snapshot, index: int) -> str:
    """Return the device's name, or its index outside the node's network namespace."""
    if own_cookie() not in (None, s.maps["settings"].get(0).host_netns):
        return str(index)
    try:
        return socket.if_indextoname(index)
    except OSError:
        return "removed"


def _by_key(entry: tuple[Any, Any]) -> str:
    return repr(entry[0])


def _by_flow(entry: tuple[Any, Any]) -> tuple[Any, ...]:
    """Return a sort key: the oldest flow first, and the entries of a flow together."""
    key, flow = entry
    return flow.created, "request" not in flow.flags, key.hook


def _entries(name: str, key: str = "", order: Any = _by_key) -> Rows:
    """Return a function that makes a row for each entry of a map.

    ``key`` names the column of keys that are not structs; values that are none are left out.
    """

    def rows(s: Snapshot) -> Iterable[Row]:
        for at, found in sorted(s.maps[name].items(), key=order):
            own = {key: _text(at)} if key else _cells(s, at)
            yield {**own, **(_cells(s, found) if isinstance(found, tuple) else {})}

    return rows


def _slot_range(slots: Range) -> str:
    return f"{slots.base}-{slots.base + slots.size - 1}" if slots.size else "none"


def _services(s: Snapshot) -> list[Row]:
    rows = (
        {**_service(s, frontend, service), **s.service_counters(service.id)}
        for frontend, service in s.services.items()
    )
    return sorted(rows, key=lambda row: [row[it] for it in ("service", "kind", "frontend")])


def _service(s: Snapshot, frontend: Frontend, service: ServiceEntry) -> Row:
    return {
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
    }


def _service_places(s: Snapshot) -> Iterable[Row]:
    """Yield the copies of services' entries, each at its place."""
    key, value = s.maps["services"].key, s.maps["services"].value
    for at, copy in sorted(s.maps["service_places"].items()):
        frontend, service = unpacked(copy)
        yield {"place": at, **_service(s, key.unpack(frontend), value.unpack(service))}


def _slots(s: Snapshot) -> Iterable[Row]:
    for slot, backend in sorted(s.slots.items()):
        name = s.backend_names.get(backend.id, BackendName("", ""))
        yield {
            "slot": slot,
            "service": s.service(backend.service),
            "endpoint": host_port(backend.address, backend.port),
            "node": name.node,
            "target": name.target,
            "id": backend.id,
            "selected_for": " ".join(sorted(backend.flags)) or "none, draining",
            "weight": backend.weight,
            **s.backend_counters(backend.id),
        }


def _choices(s: Snapshot) -> Iterable[Row]:
    """Yield the entries of the tables from which services draw endpoints."""
    services = {it.tables: it for it in s.services.values() if it.table.size}
    for tables, service in sorted(services.items()):
        for at in range(tables.base, sum(tables)):
            place = s.maps["choices"].get(at)
            yield {"place": at, "service": s.service(service.id), **place._asdict()}


def _sockets(s: Snapshot) -> Iterable[Row]:
    for cookie, entry in sorted(RememberedSockets(s.maps).items(), key=str):
        if entry.peer.frontend.port:  # sockets without a port have ended, and are not released yet
            yield {"socket": cookie, **_cells(s, entry.peer), "counted": bool(entry.counted)}


def _assignments(s: Snapshot) -> Iterable[Row]:
    for sender, entry in sorted(s.maps["assignments"].items(), key=_by_key):
        at = host_port(entry.peer.address, entry.peer.port)
        yield {**_cells(s, sender), "service": s.service(entry.service), "endpoint": at}


def _rotations(s: Snapshot) -> Iterable[Row]:
    """Yield the next position in each list of services with round-robin, from 1; 0 if none was used
    yet.
    """
    for id, found in s.maps["rotations"].items():
        if found.cluster or found.local:
            yield {"service": s.service(id), "cluster": found.cluster, "local": found.local}


def _devices(s: Snapshot) -> Iterable[Row]:
    for index, device in sorted(s.maps["devices"].items()):
        yield {"device": _device(s, index), "index": index, **_texts(device)}


def _translations(s: Snapshot) -> list[Row]:
    """Return where netfilter sends packets for which a backend was chosen. Raises NodeError."""
    from ebpflb.kernel.netfilter import nft
    from ebpflb.kernel.netfilter.elements import read_backends, unpack
    from ebpflb.kernel.netfilter.table import TABLE

    if not nft.exists(TABLE):
        return []
    backends, names = s.backends, s.backend_names
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
    "service_places": _service_places,
    "slots": _slots,
    "choices": _choices,
    "node_addresses": _entries("node_addresses", "address"),
    "own_addresses": _entries("own_addresses", "address"),
    "affinity": _entries("affinity"),
    "new_affinity": _entries("new_affinity"),
    "sockets": _sockets,
    "peers": _entries("peers"),
    "assignments": _assignments,
    "service_clients": _entries("service_clients"),
    "backend_health": _entries("backend_health"),
    **{name: _entries(name, order=_by_flow) for name in FLOW_MAPS},
    "udp_choices": _entries("udp_choices"),  # for the datagrams of each flow, engine netfilter
    "attempts": _entries("attempts"),  # TCP connections of packets without an answer yet
    "forwarded": _entries("forwarded"),
    "fragments": _entries("fragments"),
    "rotations": _rotations,
    "connections": _entries("connections"),
    "backend_loads": lambda s: (
        {"id": id, "endpoint": s.endpoint(id), **s.maps["backend_loads"].get(id)._asdict()}
        for id in sorted(s.backends)
    ),
    "source_ranges": _entries("source_ranges"),
    "service_ranges": _entries("service_ranges"),
    "cluster_ips": _entries("cluster_ips", "address"),
    "link_addresses": _entries("link_addresses", "mac"),
    "devices": _devices,
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
    "backend_names": _entries("backend_names", "id"),
}
