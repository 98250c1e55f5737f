# SPDX-License-Identifier: Apache-2.0
"""Every map as rows for people: numbers joined to names, live counters beside each row.

Reading takes a while, and the agent may write meanwhile. It counts its writes (odd while it is
at it), so a dump that is a mixture of two states says so.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.layout import VERDICTS
from ebpflb.datapath.maps.records import (
    Affinity,
    AffinityKey,
    Assignment,
    AssignmentKey,
    Peer,
    PeerFrontend,
)
from ebpflb.diagnose import packets
from ebpflb.diagnose.content import Content, Row, endpoint, host_port, kind, seconds_since
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Backend, BackendName, Frontend, Range


class Dump(NamedTuple):
    """Rows by map, and whether the agent wrote while we read."""

    maps: dict[str, list[Row]]
    changed_while_reading: bool


def dump_maps(maps: Mapping[str, Map], wanted: tuple[str, ...] = ()) -> Dump:
    """The rows of the wanted maps (none named: all), sorted."""
    before = maps["settings"].get(0).writes
    content = Content.read(maps)
    rows = {name: ROWS[name](content) for name in wanted or ROWS}
    after = maps["settings"].get(0).writes
    return Dump(rows, changed_while_reading=before != after or bool(before % 2))


def _span(span: Range) -> str:
    return f"{span.base}+{span.size}"


def _services(content: Content) -> list[Row]:
    rows = [
        {
            "service": content.service(service.id),
            "kind": kind(frontend, service),
            "frontend": str(frontend),
            "id": service.id,
            "cluster": _span(service.cluster),
            "local": _span(service.local),
            "policy": "Local" if "local" in service.flags else "Cluster",
            "endpoints": "endpoints" in service.flags,
            "affinity_seconds": service.affinity_seconds,
            **content.service_counters(service.id),
        }
        for frontend, service in content.services.items()
    ]
    return sorted(rows, key=lambda row: (row["service"], row["kind"], row["frontend"]))


def _backend(content: Content, backend: Backend) -> Row:
    name = content.backend_names.get(backend.id, BackendName("", ""))
    return {
        "service": content.service(backend.service),
        "endpoint": host_port(backend.address, backend.port),
        "node": name.node,
        "target": name.target,
        "id": backend.id,
    }


def _slots(content: Content) -> list[Row]:
    return [
        {
            "slot": slot,
            **_backend(content, backend),
            "lists": " ".join(sorted(backend.flags)) or "leaving",
            **content.backend_counters(backend.id),
        }
        for slot, backend in sorted(content.slots.items())
    ]


def _members(content: Content) -> list[Row]:
    return [
        {"slot": content.maps["members"].get(number), **_backend(content, backend)}
        for number, backend in sorted(content.backends().items())
    ]


def _node_addresses(content: Content) -> list[Row]:
    found = [address for address, _ in content.maps["node_addresses"].items()]
    return [{"address": str(address)} for address in sorted(found, key=str)]


def _affinity(content: Content) -> list[Row]:
    backends = content.backends()
    entries: list[tuple[AffinityKey, Affinity]] = list(content.maps["affinity"].items())
    return [
        {
            "client": f"netns {client.netns}" if client.netns else str(client.address),
            "service": content.service(client.service),
            "endpoint": endpoint(backends, entry.backend),
            "idle_seconds": seconds_since(entry.last_used),
        }
        for client, entry in sorted(entries, key=str)
    ]


def _sockets(content: Content) -> list[Row]:
    entries: list[tuple[Peer, PeerFrontend]] = list(content.maps["sockets"].items())
    return [
        {
            "socket": peer.socket,
            "frontend": str(origin.frontend),
            "protocol": Protocol(origin.frontend.protocol).name,
            "peer": host_port(origin.address, origin.port),
            "service": _service_at(content, origin.frontend),
        }
        for peer, origin in sorted(entries, key=str)
    ]


def _service_at(content: Content, frontend: Frontend) -> str:
    service = content.services.get(frontend)
    return content.service(service.id) if service else ""


def _assignments(content: Content) -> list[Row]:
    entries: list[tuple[AssignmentKey, Assignment]] = list(content.maps["assignments"].items())
    return [
        {
            "socket": sender.socket,
            "frontend": str(sender.frontend),
            "service": content.service(assignment.service),
            "endpoint": host_port(assignment.address, assignment.port),
        }
        for sender, assignment in sorted(entries, key=str)
        if sender.frontend.port  # the others are heads of chains
    ]


def _service_stats(content: Content) -> list[Row]:
    return [
        {"id": number, "service": content.service(number), **content.service_counters(number)}
        for number in sorted(content.service_names)
    ]


def _backend_stats(content: Content) -> list[Row]:
    return [
        {**_backend(content, backend), **content.backend_counters(number)}
        for number, backend in sorted(content.backends().items())
    ]


def _verdicts(content: Content) -> list[Row]:
    return [
        {"verdict": name, "count": content.maps["verdicts"].get(number)[0]}
        for number, name in VERDICTS.items()
    ]


def _service_names(content: Content) -> list[Row]:
    return [
        {"id": number, **name._asdict(), "protocol": Protocol(name.protocol).name}
        for number, name in sorted(content.service_names.items())
    ]


def _backend_names(content: Content) -> list[Row]:
    names = sorted(content.backend_names.items())
    return [{"id": number, **name._asdict()} for number, name in names]


# Every map but scratch: what is in there lasts no longer than a packet.
ROWS: dict[str, Callable[[Content], list[Row]]] = {
    "services": _services,
    "slots": _slots,
    "members": _members,
    "node_addresses": _node_addresses,
    "affinity": _affinity,
    "sockets": _sockets,
    "assignments": _assignments,
    **packets.ROWS,
    "service_stats": _service_stats,
    "backend_stats": _backend_stats,
    "verdicts": _verdicts,
    "service_names": _service_names,
    "backend_names": _backend_names,
}
