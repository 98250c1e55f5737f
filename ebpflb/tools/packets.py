# SPDX-License-Identifier: Apache-2.0
"""What packets leave in the maps, as rows: flows, fragments and counts; and counted connections."""

from collections.abc import Callable, Mapping
from typing import Any

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import (
    AssignmentKey,
    Attempt,
    CountedConnection,
    DatagramChoice,
    FlowGate,
    Forwarded,
    FragmentKey,
    FragmentPorts,
    HalfOpen,
)
from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.model.addresses import host_port
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import (
    Chosen,
    Frontend,
    protocol_name,
)
from ebpflb.plan.flow_entries import Flow, FlowKind, Hook, Tuple
from ebpflb.tools.snapshot import Row, Snapshot, endpoint, seconds_since

_FLOW_NUMBERS = 1 << 63  # bpf/engine/flows/count.h
_HOOKS = {int(hook): hook.name.lower() for hook in Hook}


def _flows(name: str) -> Callable[[Snapshot], list[Row]]:
    """The entries of each flow stand together, the oldest flow first."""

    def rows(snapshot: Snapshot) -> list[Row]:
        entries: list[tuple[Tuple, Flow]] = list(snapshot.maps[name].items())
        entries.sort(key=lambda e: (e[1].created, "request" not in e[1].flags, e[0].hook))
        backends = snapshot.backends()
        return [
            {
                **_ends(key),
                "rewritten": _rewritten(key, flow),
                "service": snapshot.service(flow.service),
                "endpoint": endpoint(backends, flow.backend),
                "flags": " ".join(sorted(flow.flags)),
                "age_seconds": seconds_since(flow.created),
                "idle_seconds": seconds_since(flow.last_seen),
            }
            for key, flow in entries
        ]

    return rows


def _way(key: Tuple | FragmentKey) -> Row:
    hook = _HOOKS.get(key.hook, f"hook {key.hook}")
    return {"hook": hook, "protocol": protocol_name(key.protocol)}


def _ends(key: Tuple) -> Row:
    return {
        **_way(key),
        "source": host_port(key.source, key.source_port),
        "destination": host_port(key.destination, key.destination_port),
    }


def _rewritten(key: Tuple, flow: Flow) -> str:
    ends = "destination", "source"
    here, there = ends if key.hook == Hook.INGRESS else reversed(ends)
    if flow.kind == FlowKind.SNAT_PENDING:
        return f"{here} not chosen yet"
    other_port = key.source_port if key.hook == Hook.INGRESS else key.destination_port
    also = f", {there} port := {flow.other_port}" if flow.other_port != other_port else ""
    return f"{here} := {host_port(flow.address, flow.port)}{also}"


def _taken(opened: Map) -> list[Any]:
    """The records of an array that are taken, by ``created``."""
    found = [value for _, value in opened.written_items() if value.created]
    return sorted(found, key=lambda it: it.created)


def _half_open(snapshot: Snapshot) -> list[Row]:
    """The flows that are half-open, the oldest first. Each new flow takes a place, which it keeps
    when it is established or has ended.
    """
    places: list[HalfOpen] = _taken(snapshot.maps["half_open"])
    taken = [place for place in places if _is_half_open(snapshot.maps, place)]
    return [
        {
            **_ends(it.request),
            "age_seconds": seconds_since(it.created),
        }
        for it in taken
    ]


def _is_half_open(maps: Mapping[str, Map], place: HalfOpen) -> bool:
    """As flow_is_half_open (bpf/engine/flows/half_open.h)."""
    table = maps["tcp_flows" if place.request.protocol == Protocol.TCP else "other_flows"]
    request: Flow | None = table.get(place.request)
    if request is None or request.created != place.created:
        return False
    if place.request.protocol != Protocol.UDP:
        return "seen" not in request.flags
    reply: Flow | None = table.get(place.reply)
    return reply is not None and "seen" not in reply.flags


def _udp_choices(snapshot: Snapshot) -> list[Row]:
    """What the datagrams of each flow get on the engine netfilter."""
    backends = snapshot.backends()
    entries: list[tuple[Tuple, DatagramChoice]] = list(snapshot.maps["udp_choices"].items())
    return [
        {
            **_ends(key),
            "service": snapshot.service(choice.service),
            "endpoint": endpoint(backends, choice.chosen & Chosen.ID),
            "masquerade": bool(choice.chosen & Chosen.MASQUERADE),
            "idle_seconds": seconds_since(choice.last_used),
        }
        for key, choice in sorted(entries, key=str)
    ]


def _attempts(snapshot: Snapshot) -> list[Row]:
    """The TCP connections of packets that have had no answer yet."""
    backends = snapshot.backends()
    entries: list[tuple[Tuple, Attempt]] = list(snapshot.maps["attempts"].items())
    return [
        {
            **_ends(key),
            "service": snapshot.service(attempt.service),
            "endpoint": endpoint(backends, attempt.backend),
            "client": f"{attempt.client:#x}",
            "seconds": seconds_since(attempt.since),
            "has_failed": bool(attempt.has_failed),
        }
        for key, attempt in sorted(entries, key=str)
    ]


def _stale_endpoints(snapshot: Snapshot) -> list[Row]:
    """The UDP endpoints that were removed a moment ago."""
    entries: list[tuple[Frontend, int]] = list(snapshot.maps["stale_endpoints"].items())
    return [
        {"endpoint": host_port(key.address, key.port), "reports_left": left}
        for key, left in sorted(entries, key=str)
    ]


def _recent_choices(snapshot: Snapshot) -> list[Row]:
    """What packets got last on the engine netfilter, by a hash of their ends. Elements that were
    never written are left out.
    """
    backends = snapshot.backends()
    return [
        {
            "index": index,
            "service": snapshot.service(it.choice >> 32),
            "endpoint": endpoint(backends, it.choice & Chosen.ID),
            "masquerade": bool(it.choice & Chosen.MASQUERADE),
        }
        for index, it in snapshot.maps["recent_choices"].written_items()
    ]


def _flow_gate(snapshot: Snapshot) -> list[Row]:
    """Whether packets are looked up in the flow tables, which may hold flows."""
    gate: FlowGate = snapshot.maps["flow_gate"].get(0)
    is_open = gate.empty != gate.opened + gate.written + 1
    return [{"opened": gate.opened, "written": gate.written, "is_open": is_open}]


def _fragments(snapshot: Snapshot) -> list[Row]:
    entries: list[tuple[FragmentKey, FragmentPorts]] = list(snapshot.maps["fragments"].items())
    return [
        {
            **_way(key),
            "source": str(key.source),
            "destination": str(key.destination),
            "id": key.id,
            "source_port": ports.source_port,
            "destination_port": ports.destination_port,
            "idle_seconds": seconds_since(ports.seen),
        }
        for key, ports in sorted(entries, key=str)
    ]


def _forwarded(snapshot: Snapshot) -> list[Row]:
    entries: list[tuple[Tuple, Forwarded]] = list(snapshot.maps["forwarded"].items())
    return [
        {
            **_ends(key),
            "replied": bool(entry.replied),
            "age_seconds": seconds_since(entry.since),
        }
        for key, entry in sorted(entries, key=str)
    ]


def _flow_stats(snapshot: Snapshot) -> list[Row]:
    stats = snapshot.maps["flow_stats"]
    fields = ("created", "deleted", "refused", "displaced")
    return [
        {"map": name, **dict(zip(fields, stats.get(number), strict=True))}
        for number, name in enumerate(FLOW_MAPS)
    ]


def _sweeps(snapshot: Snapshot) -> list[Row]:
    return [
        {"map": name, **snapshot.maps["sweeps"].get(number)._asdict()}
        | {"capacity": snapshot.maps[name].spec.entries}
        for number, name in enumerate(FLOW_MAPS)
    ]


def _reject_budgets(snapshot: Snapshot) -> list[Row]:
    """The budgets that were used; when each CPU's was refilled means nothing in sum."""
    budgets = snapshot.maps["reject_budgets"]
    return [
        {"replies": "answers to pings" if number else "refusals", "left": left}
        for number in range(budgets.spec.entries)
        for refilled, left in [budgets.get(number)]
        if refilled
    ]


def _rotations(snapshot: Snapshot) -> list[Row]:
    """Whose turn is next in each list of services with round-robin, from 1; 0: there was none."""
    return [
        {"service": snapshot.service(id), "cluster": found.cluster, "local": found.local}
        for id, found in snapshot.maps["rotations"].written_items()
        if found.cluster or found.local
    ]


def _connections(snapshot: Snapshot) -> list[Row]:
    """Of services with least-connections. A flow's number is no socket's cookie."""
    backends = snapshot.backends()
    entries: list[tuple[AssignmentKey, CountedConnection]] = list(
        snapshot.maps["connections"].items()
    )
    return [
        {
            "of": "flow" if key.socket >= _FLOW_NUMBERS else "socket",
            "number": key.socket,
            "frontend": str(key.frontend) if key.frontend.port else "",
            "endpoint": endpoint(backends, counted.backend),
            "generation": counted.generation,
        }
        for key, counted in sorted(entries, key=str)
    ]


def _backend_loads(snapshot: Snapshot) -> list[Row]:
    backends, loads = snapshot.backends(), snapshot.maps["backend_loads"]
    return [
        {"id": number, "endpoint": endpoint(backends, number), **loads.get(number)._asdict()}
        for number in sorted(backends)
    ]


PACKET_ROWS: dict[str, Callable[[Snapshot], list[Row]]] = {
    **{name: _flows(name) for name in FLOW_MAPS},
    "half_open": _half_open,
    "udp_choices": _udp_choices,
    "attempts": _attempts,
    "stale_endpoints": _stale_endpoints,
    "recent_choices": _recent_choices,
    "flow_gate": _flow_gate,
    "forwarded": _forwarded,
    "fragments": _fragments,
    "flow_stats": _flow_stats,
    "sweeps": _sweeps,
    "reject_budgets": _reject_budgets,
    "rotations": _rotations,
    "connections": _connections,
    "backend_loads": _backend_loads,
}
