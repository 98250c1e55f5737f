# SPDX-License-Identifier: Apache-2.0
"""Every map as rows for the operator: with names instead of ids, and with counters.

The agent may write while the maps are read. It counts its writes (the count is odd during a
write), so the dump can tell whether its rows may be of two states.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.kernel.maps.records import (
    Affinity,
    AffinityKey,
    AssignmentKey,
    BackendHealth,
    Peer,
    PeerFrontend,
    ServiceBackend,
    ServiceClient,
    SocketEntry,
)
from ebpflb.kernel.maps.sockets import RememberedSockets
from ebpflb.model.addresses import Family, host_port
from ebpflb.plan.entries import (
    Backend,
    BackendName,
    Frontend,
    Range,
    frontend_kind,
    protocol_name,
)
from ebpflb.plan.tables import scheduler_of
from ebpflb.tools import node_maps, packets
from ebpflb.tools.flow_list import dump_connections
from ebpflb.tools.snapshot import Row, Snapshot, endpoint, seconds_since


class Dump(NamedTuple):
    """Rows by map, and whether the agent wrote during the dump."""

    maps: dict[str, list[Row]]
    changed_while_reading: bool


def dump_maps(maps: Mapping[str, Map], names: tuple[str, ...] = ()) -> Dump:
    """The rows of the maps with these names, or of all maps; sorted."""
    before = maps["settings"].get(0).writes
    snapshot = Snapshot(maps)
    rows = {name: ROWS[name](snapshot) for name in names or ROWS}
    after = maps["settings"].get(0).writes
    return Dump(rows, changed_while_reading=before != after or bool(before % 2))


def _slot_range(slots: Range) -> str:
    return f"{slots.base}-{slots.base + slots.size - 1}" if slots.size else "none"


def _services(snapshot: Snapshot) -> list[Row]:
    rows = [
        {
            "service": snapshot.service(service.id),
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
            **snapshot.service_counters(service.id),
        }
        for frontend, service in snapshot.services.items()
    ]
    return sorted(rows, key=lambda row: (row["service"], row["kind"], row["frontend"]))


def _backend(snapshot: Snapshot, backend: Backend) -> Row:
    name = snapshot.backend_names.get(backend.id, BackendName("", ""))
    return {
        "service": snapshot.service(backend.service),
        "endpoint": host_port(backend.address, backend.port),
        "node": name.node,
        "target": name.target,
        "id": backend.id,
    }


def _slots(snapshot: Snapshot) -> list[Row]:
    return [
        {
            "slot": slot,
            **_backend(snapshot, backend),
            "selected_for": " ".join(sorted(backend.flags)) or "none, draining",
            "weight": backend.weight,
            **snapshot.backend_counters(backend.id),
        }
        for slot, backend in sorted(snapshot.slots.items())
    ]


def _choices(snapshot: Snapshot) -> list[Row]:
    """The places of tables that services draw from."""
    services = {it.tables: it for it in snapshot.services.values() if it.table.size}
    places = snapshot.maps["choices"]
    return [
        {"place": at, "service": snapshot.service(service.id), **places.get(at)._asdict()}
        for tables, service in sorted(services.items())
        for at in range(tables.base, sum(tables))
    ]


def _backend_slots(snapshot: Snapshot) -> list[Row]:
    return [
        {"slot": snapshot.maps["backend_slots"].get(number), **_backend(snapshot, backend)}
        for number, backend in sorted(snapshot.backends().items())
    ]


def _service_clients(snapshot: Snapshot) -> list[Row]:
    clients: list[ServiceClient] = [key for key, _ in snapshot.maps["service_clients"].items()]
    return [
        {"service": snapshot.service(it.service), "client": f"{it.client:#x}"}
        for it in sorted(clients)
    ]


def _backend_health(snapshot: Snapshot) -> list[Row]:
    backends = snapshot.backends()
    health = snapshot.maps["backend_health"]
    entries: list[tuple[ServiceBackend, BackendHealth]] = list(health.items())
    return [
        {
            "service": snapshot.service(key.service),
            "endpoint": endpoint(backends, key.backend),
            "clients_failed": sum(map(bool, (it.first, it.second, it.third))),
            "first_failed_seconds": seconds_since(it.since) if it.first else None,
            "has_opened": bool(it.has_opened),
            "id": key.backend,
        }
        for key, it in sorted(entries)
    ]


def _addresses(name: str, snapshot: Snapshot) -> list[Row]:
    found = [address for address, _ in snapshot.maps[name].items()]
    return [{"address": str(address)} for address in sorted(found, key=str)]


def _affinity(name: str) -> Callable[[Snapshot], list[Row]]:
    def rows(snapshot: Snapshot) -> list[Row]:
        backends = snapshot.backends()
        entries: list[tuple[AffinityKey, Affinity]] = list(snapshot.maps[name].items())
        return [
            {
                "client": f"netns {client.netns}" if client.netns else str(client.address),
                "service": snapshot.service(client.service),
                "endpoint": endpoint(backends, entry.backend),
                "idle_seconds": seconds_since(entry.last_used),
            }
            for client, entry in sorted(entries, key=str)
        ]

    return rows


def _sockets(snapshot: Snapshot) -> list[Row]:
    entries = list(RememberedSockets(snapshot.maps).items())
    return [
        {**_peer(snapshot, socket, entry.peer), "counted": bool(entry.counted)}
        for socket, entry in sorted(entries, key=str)
        if entry.peer.frontend.port  # the others were ended, and are not released yet
    ]


def _socket_places(snapshot: Snapshot) -> list[Row]:
    places = snapshot.maps["socket_places"].items()
    return [{"place": at, "socket": place.socket} for at, place in places if place.socket]


def _peers(snapshot: Snapshot) -> list[Row]:
    entries: list[tuple[Peer, PeerFrontend]] = list(snapshot.maps["peers"].items())
    return [_peer(snapshot, peer.socket, of) for peer, of in sorted(entries, key=str)]


def _peer(snapshot: Snapshot, socket: int, remembered: PeerFrontend) -> Row:
    return {
        "socket": socket,
        "frontend": str(remembered.frontend),
        "protocol": protocol_name(remembered.frontend.protocol),
        "peer": host_port(remembered.address, remembered.port),
        "service": _service_at(snapshot, remembered.frontend),
    }


def _service_at(snapshot: Snapshot, frontend: Frontend) -> str:
    service = snapshot.services.get(frontend)
    return snapshot.service(service.id) if service else ""


def _assignments(snapshot: Snapshot) -> list[Row]:
    entries: list[tuple[AssignmentKey, SocketEntry]] = list(snapshot.maps["assignments"].items())
    return [
        {
            "socket": sender.socket,
            "frontend": str(sender.frontend),
            "service": snapshot.service(entry.service),
            "endpoint": host_port(entry.peer.address, entry.peer.port),
        }
        for sender, entry in sorted(entries, key=str)
    ]


def _sockets_full(snapshot: Snapshot) -> list[Row]:
    return [snapshot.maps["sockets_full"].get(0)._asdict()]


def _service_stats(snapshot: Snapshot) -> list[Row]:
    return [
        {"id": number, "service": snapshot.service(number), **snapshot.service_counters(number)}
        for number in sorted(snapshot.service_names)
    ]


def _backend_stats(snapshot: Snapshot) -> list[Row]:
    return [
        {**_backend(snapshot, backend), **snapshot.backend_counters(number)}
        for number, backend in sorted(snapshot.backends().items())
    ]


def _verdicts(snapshot: Snapshot) -> list[Row]:
    return [
        {"verdict": name, "count": snapshot.maps["verdicts"].get(number)[0]}
        for number, name in VERDICTS.items()
    ]


def _service_names(snapshot: Snapshot) -> list[Row]:
    return [
        {"id": number, "service": snapshot.service(number), "family": str(Family(name.family))}
        for number, name in sorted(snapshot.service_names.items())
    ]


def _backend_names(snapshot: Snapshot) -> list[Row]:
    names = sorted(snapshot.backend_names.items())
    return [{"id": number, **name._asdict()} for number, name in names]


def _translations(snapshot: Snapshot) -> list[Row]:
    """Where netfilter sends packets for which a backend was chosen. Raises NodeError."""
    # pyroute2, which these import, takes as long to import as all other maps to print.
    from ebpflb.kernel.netfilter import nft
    from ebpflb.kernel.netfilter.elements import read_backends, unpack
    from ebpflb.kernel.netfilter.rules import TABLE

    if not nft.exists(TABLE):
        return []
    backends, names = snapshot.backends(), snapshot.backend_names
    return [
        {
            "service": snapshot.service(backends[id].service) if id in backends else "",
            "endpoint": host_port(*unpack(translated)),
            "target": names[id].target if id in names else "",
            "id": id,
        }
        for id, translated in sorted(read_backends().items())
    ]


# Two are no maps of ours: "conntrack" has the kernel's entries that lead to frontends,
# "translations" the elements of netfilter's table.
# Every map but two: what is in scratch lasts no longer than a packet, and the secret is one.
ROWS: dict[str, Callable[[Snapshot], list[Row]]] = {
    "services": _services,
    "slots": _slots,
    "choices": _choices,
    "backend_slots": _backend_slots,
    "node_addresses": partial(_addresses, "node_addresses"),
    "own_addresses": partial(_addresses, "own_addresses"),
    **{name: _affinity(name) for name in ("affinity", "new_affinity")},
    "sockets": _sockets,
    "socket_places": _socket_places,
    "sockets_full": _sockets_full,
    "peers": _peers,
    "assignments": _assignments,
    "service_clients": _service_clients,
    "backend_health": _backend_health,
    **packets.PACKET_ROWS,
    **node_maps.NODE_MAP_ROWS,
    "conntrack": lambda snapshot: dump_connections(snapshot.maps),
    "translations": _translations,
    "service_stats": _service_stats,
    "backend_stats": _backend_stats,
    "verdicts": _verdicts,
    "service_names": _service_names,
    "backend_names": _backend_names,
}
