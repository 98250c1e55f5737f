# SPDX-License-Identifier: Apache-2.0
"""The maps of the packet path as rows, and the settings, most of which are for it."""

import socket
import sys
from collections.abc import Callable
from typing import Any

from ebpflb.datapath.maps.layout import address_bytes
from ebpflb.datapath.maps.records import Forwarded, FragmentKey, FragmentPorts, HalfOpen
from ebpflb.datapath.maps.sweep import FLOW_MAPS
from ebpflb.diagnose.snapshot import Row, Snapshot, endpoint, host_port, seconds_since
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import DeviceEntry, Prefix, ServiceRange, SourceRange
from ebpflb.plan.flow_entries import Flow, FlowKind, Hook, Tuple

_RANGE_OF = {0: "load balancer", 1: "nodeport"}
_SERVICE_BITS = 64  # of a source range's length
_SO_NETNS_COOKIE = 71


def _flows(name: str) -> Callable[[Snapshot], list[Row]]:
    """The entries of each flow stand together, the oldest flow first."""

    def rows(snapshot: Snapshot) -> list[Row]:
        entries: list[tuple[Tuple, Flow]] = list(snapshot.maps[name].items())
        entries.sort(key=lambda e: (e[1].created, "request" not in e[1].flags, e[0].hook))
        backends = snapshot.backends()
        return [
            {
                **_ends(key, host_port(key.source, key.source_port)),
                "destination": host_port(key.destination, key.destination_port),
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


def _ends(key: Tuple | FragmentKey, source: str) -> Row:
    hook, protocol = Hook(key.hook).name.lower(), Protocol(key.protocol).name
    return {"hook": hook, "protocol": protocol, "source": source}


def _rewritten(key: Tuple, flow: Flow) -> str:
    ends = "destination", "source"
    here, there = ends if key.hook == Hook.INGRESS else reversed(ends)
    if flow.kind == FlowKind.SNAT_PENDING:
        return f"{here} not chosen yet"
    other_port = key.source_port if key.hook == Hook.INGRESS else key.destination_port
    also = f", {there} port := {flow.other_port}" if flow.other_port != other_port else ""
    return f"{here} := {host_port(flow.address, flow.port)}{also}"


def _half_open(snapshot: Snapshot) -> list[Row]:
    """The places that are taken, the flow that is the oldest first."""
    places: list[HalfOpen] = [place for _, place in snapshot.maps["half_open"].items()]
    taken = sorted((place for place in places if place.created), key=lambda it: it.created)
    return [
        {
            **_ends(it.request, host_port(it.request.source, it.request.source_port)),
            "destination": host_port(it.request.destination, it.request.destination_port),
            "age_seconds": seconds_since(it.created),
        }
        for it in taken
    ]


def _fragments(snapshot: Snapshot) -> list[Row]:
    entries: list[tuple[FragmentKey, FragmentPorts]] = list(snapshot.maps["fragments"].items())
    return [
        {
            **_ends(key, str(key.source)),
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
            **_ends(key, host_port(key.source, key.source_port)),
            "destination": host_port(key.destination, key.destination_port),
            "replied": bool(entry.replied),
            "age_seconds": seconds_since(entry.since),
        }
        for key, entry in sorted(entries, key=str)
    ]


def _source_ranges(snapshot: Snapshot) -> list[Row]:
    keys: list[SourceRange] = [key for key, _ in snapshot.maps["source_ranges"].items()]
    bits = [(key, key.length - _SERVICE_BITS) for key in keys]
    found = sorted(
        (snapshot.service(key.service), _RANGE_OF[key.nodeport], _cidr(key.address, n))
        for key, n in bits
    )
    return [{"service": service, "of": of, "range": cidr} for service, of, cidr in found]


def _service_ranges(snapshot: Snapshot) -> list[Row]:
    keys: list[ServiceRange] = [key for key, _ in snapshot.maps["service_ranges"].items()]
    return [{"range": text} for text in sorted(_cidr(key.address, key.length) for key in keys)]


def _cidr(address: Address, bits: int) -> str:
    return f"{address}/{bits - 96 if address.version == 4 else bits}"


def _cluster_ips(snapshot: Snapshot) -> list[Row]:
    services: dict[Address, set[str]] = {}
    for frontend, service in snapshot.services.items():
        services.setdefault(frontend.address, set()).add(snapshot.service(service.id))
    found = sorted((address for address, _ in snapshot.maps["cluster_ips"].items()), key=str)
    return [
        {"address": str(at), "services": " ".join(sorted(services.get(at, ())))} for at in found
    ]


def _devices(snapshot: Snapshot) -> list[Row]:
    entries: list[tuple[int, DeviceEntry]] = list(snapshot.maps["devices"].items())
    name = _device if _netns() in (None, snapshot.maps["settings"].get(0).host_netns) else str
    return [
        {"device": name(index), "index": index}
        | {name: _text(value) for name, value in device._asdict().items()}
        for index, device in sorted(entries)
    ]


def _netns() -> int | None:
    """The cookie of our network namespace; None if the kernel cannot tell (before 5.14)."""
    with socket.socket() as any_socket:
        try:
            cookie = any_socket.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError:
            return None
    return int.from_bytes(cookie, sys.byteorder)


def _device(index: int) -> str:
    """Its name, in the network namespace of the node."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return "removed"


def _settings(snapshot: Snapshot) -> list[Row]:
    settings = snapshot.maps["settings"].get(0)
    return [{name: _text(value) for name, value in settings._asdict().items()}]


def _text(value: Any) -> str | int:
    """Numbers as they are, flags as words; nothing where no address is meant."""
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
    """When each CPU's was refilled means nothing in sum."""
    return [{"left": snapshot.maps["reject_budgets"].get(0)[1]}]


ROWS: dict[str, Callable[[Snapshot], list[Row]]] = {
    **{name: _flows(name) for name in FLOW_MAPS},
    "half_open": _half_open,
    "forwarded": _forwarded,
    "fragments": _fragments,
    "source_ranges": _source_ranges,
    "service_ranges": _service_ranges,
    "cluster_ips": _cluster_ips,
    "devices": _devices,
    "settings": _settings,
    "flow_stats": _flow_stats,
    "sweeps": _sweeps,
    "reject_budgets": _reject_budgets,
}
