# SPDX-License-Identifier: Apache-2.0
"""What the agent writes for the packet path, as rows: ranges, addresses, devices and settings."""

import socket
from collections.abc import Callable
from typing import Any

from ebpflb.kernel.attach.netns_cookie import by_socket
from ebpflb.kernel.maps.layout import address_bytes
from ebpflb.model.addresses import Address
from ebpflb.plan.entries import (
    DeviceEntry,
    PodDevice,
    Prefix,
    RouteKey,
    ServiceRange,
    SourceRange,
)
from ebpflb.tools.snapshot import Row, Snapshot

_RANGE_OF = {0: "load balancer", 1: "nodeport"}
_SERVICE_BITS = 64  # of a source range's length
_DEVICE_BITS = 32  # of a route key's


def _source_ranges(snapshot: Snapshot) -> list[Row]:
    keys: list[SourceRange] = [key for key, _ in snapshot.maps["source_ranges"].items()]
    bits = [(key, key.length - _SERVICE_BITS) for key in keys]
    found = sorted(
        (
            snapshot.service(key.service),
            _RANGE_OF.get(key.nodeport, "nothing"),
            _cidr(key.address, n),
        )
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
    name = _device_namer(snapshot)
    return [
        {"device": name(index), "index": index}
        | {name: _text(value) for name, value in device._asdict().items()}
        for index, device in sorted(entries)
    ]


def _pod_devices(snapshot: Snapshot) -> list[Row]:
    entries: list[tuple[Address, PodDevice]] = list(snapshot.maps["pod_devices"].items())
    name = _device_namer(snapshot)
    rows = ({"pod": str(at), "device": name(it.ifindex), **it._asdict()} for at, it in entries)
    return sorted(rows, key=lambda row: str(row["pod"]))


def _link_addresses(snapshot: Snapshot) -> list[Row]:
    return [
        {"mac": mac} for mac in sorted(mac for mac, _ in snapshot.maps["link_addresses"].items())
    ]


def _route_sources(snapshot: Snapshot) -> list[Row]:
    entries: list[tuple[RouteKey, Address]] = list(snapshot.maps["route_sources"].items())
    name = _device_namer(snapshot)
    rows = (
        {
            "device": name(key.ifindex),
            "index": key.ifindex,
            "destination": _cidr(key.destination, key.length - _DEVICE_BITS),
            "source": str(source),
        }
        for key, source in entries
    )
    return sorted(rows, key=lambda row: (row["index"], row["destination"]))


def _device_namer(snapshot: Snapshot) -> Callable[[int], str]:
    same = by_socket() in (None, snapshot.maps["settings"].get(0).host_netns)
    return _device if same else str


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


NODE_MAP_ROWS: dict[str, Callable[[Snapshot], list[Row]]] = {
    "source_ranges": _source_ranges,
    "service_ranges": _service_ranges,
    "cluster_ips": _cluster_ips,
    "link_addresses": _link_addresses,
    "devices": _devices,
    "pod_devices": _pod_devices,
    "route_sources": _route_sources,
    "settings": _settings,
}
