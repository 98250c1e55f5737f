# SPDX-License-Identifier: Apache-2.0
"""EndpointSlices as they are stored: read once, reduced to the fields that a node needs.

A large cluster has 100,000 entries, and each change of one comes with all others of its slice. So
addresses are parsed once, equal parts are one object, and an unchanged entry stays the same object,
so that later comparisons are fast. plan/planner.py makes slots of them.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import NamedTuple

from msgspec import Struct, structs

from ebpflb import errors
from ebpflb.model import addresses, annotations, objects, services
from ebpflb.model.addresses import Address, Family
from ebpflb.model.events import Key

SERVICE_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"  # if present: no cluster IP, not served here

_ADDRESS_TYPES: dict[str, Family | None] = {**addresses.FAMILIES, "FQDN": None}
_DEFAULT_CONDITIONS = objects.EndpointConditions()


class EndpointName(NamedTuple):
    """The node, pod (``target``) and zone of an endpoint. Each may be ""."""

    node: str
    target: str
    zone: str = ""


class Conditions(NamedTuple):
    """Absent means: ready, serving, not terminating (kube-proxy.md 2)."""

    ready: bool
    serving: bool
    terminating: bool


class Hints(NamedTuple):
    """The zones and the nodes that should use an endpoint."""

    zones: frozenset[str]
    nodes: frozenset[str]


_NO_HINTS = Hints(frozenset(), frozenset())


class StoredEndpoint(Struct, frozen=True, gc=False):
    """One entry of a slice.

    Only the first address counts (kube-proxy.md 2): ``address`` is a string if it is invalid, and
    None if it is missing.
    """

    address: Address | str | None
    conditions: Conditions
    name: EndpointName
    hints: Hints


Ports = Mapping[tuple[str, str], tuple[int, ...]]


class StoredSlice(Struct, frozen=True, gc=False):
    """An EndpointSlice of ``service``; ``family`` is None if the slice has no IP addresses.

    ``ports``: name and protocol -> numbers.
    """

    name: str
    service: Key
    family: Family | None
    ports: Ports
    endpoints: tuple[StoredEndpoint, ...]
    trigger_time: str | None  # when the change happened (kube-proxy.md 16.4)
    weight: int = annotations.DEFAULT_WEIGHT


class ReadSlice(NamedTuple):
    """An EndpointSlice after reading; ``stored`` is None if the slice is to be ignored.

    ``warnings`` has one line for each part that is not served.
    """

    stored: StoredSlice | None
    warnings: tuple[str, ...]


def service_of(slice: objects.EndpointSlice) -> Key | None:
    """Return the Service that a slice belongs to, by label; None if the slice is to be ignored."""
    meta = slice.metadata
    labels = meta.labels or {}
    service = labels.get(SERVICE_LABEL)
    if not service or not meta.name or not meta.namespace or HEADLESS_LABEL in labels:
        return None
    return Key(sys.intern(meta.namespace), service)


def read(slice: objects.EndpointSlice) -> ReadSlice:
    """Return the slice in its stored form, a fraction of the size of the decoded object.

    Raises InvalidObject for an invalid addressType, protocol or port number.
    """
    family = objects.one_of("addressType", slice.address_type, _ADDRESS_TYPES)
    ports = tuple(slice.ports or ())
    found = tuple([_stored(entry, family) for entry in slice.endpoints or ()])
    lines: list[str] = []
    weight = annotations.read_weight(slice, lines)
    if family is None:
        lines = ["addressType: FQDN endpoints are not served"]
    else:
        lines += annotations.slice_warnings(slice)
        lines += _port_warnings(ports)
        lines += _address_warnings(found, family)
    warnings = errors.some_lines(lines) if lines else ()
    service = service_of(slice)
    if service is None:
        return ReadSlice(None, warnings)
    trigger = slice.metadata.annotation(objects.TRIGGER_TIME)
    name = slice.metadata.name
    shared = (_shared_ports if len(ports) <= _FEW else _ports)(ports)
    stored = StoredSlice(name, service, family, shared, found, trigger, weight)
    return ReadSlice(stored, warnings)


def reused(slice: StoredSlice, former: StoredSlice) -> StoredSlice:
    """Return the slice with the former slice's objects for endpoints that are equal.

    Endpoints without a pod share one name, and stay new objects.
    """
    stored = {each.name: each for each in former.endpoints}
    kept = [it if (it := stored.get(each.name)) == each else each for each in slice.endpoints]
    return structs.replace(slice, endpoints=tuple(kept))


def port_numbers(slice: StoredSlice, name: services.PortName) -> Iterator[int]:
    """Yield the port numbers of the slice's endpoints for a service port."""
    yield from slice.ports.get((name.port, name.protocol.name), ())


def _stored(entry: objects.SliceEndpoint, family: Family | None) -> StoredEndpoint:
    found = entry.conditions or _DEFAULT_CONDITIONS
    target = entry.target_ref.name if entry.target_ref else ""
    return StoredEndpoint(
        _address(entry.addresses[0], family) if entry.addresses else None,
        _conditions(found.ready, found.serving, found.terminating),
        EndpointName(sys.intern(entry.node_name or ""), target, sys.intern(entry.zone or "")),
        _hints(entry.hints) if entry.hints else _NO_HINTS,
    )


def _address(text: str, family: Family | None) -> Address | str:
    try:
        return addresses.parse_address(text, family) if family else text
    except ValueError:
        return text


_FEW = 16  # ports or hints: more are not kept for other slices, whatever tenants write


@lru_cache(maxsize=4096)
def _shared_ports(ports: tuple[objects.SlicePort, ...]) -> Ports:
    """Return one shared object for all slices with the same ports.

    Most slices of a cluster share one.
    """
    return _ports(ports)


def _ports(ports: Iterable[objects.SlicePort]) -> Ports:
    found: dict[tuple[str, str], list[int]] = {}
    for port in ports:
        if port.port and port.name is not None:
            found.setdefault((port.name, _protocol(port)), []).append(port.port)
    return {key: tuple(numbers) for key, numbers in found.items()}


@cache
def _conditions(ready: bool | None, serving: bool | None, terminating: bool | None) -> Conditions:
    return Conditions(ready is not False, serving is not False, terminating is True)


def _hints(hints: objects.EndpointHints) -> Hints:
    zones, nodes = _names(hints.for_zones), _names(hints.for_nodes)
    if len(zones) + len(nodes) > _FEW:
        return Hints(frozenset(zones), frozenset(nodes))
    return _shared_hints(zones, nodes)


@lru_cache(maxsize=4096)
def _shared_hints(zones: tuple[str, ...], nodes: tuple[str, ...]) -> Hints:
    """Return one shared object for all endpoints with the same hints; saves 400 bytes each."""
    return Hints(frozenset(zones), frozenset(nodes))


def _names(hints: list[objects.Hint] | None) -> tuple[str, ...]:
    return tuple([hint.name for hint in hints]) if hints else ()


def _protocol(port: objects.SlicePort) -> str:
    return "TCP" if port.protocol is None else port.protocol


def _port_warnings(ports: Iterable[objects.SlicePort]) -> Iterator[str]:
    for index, port in enumerate(ports):
        objects.one_of(f"ports[{index}].protocol", _protocol(port), services.PROTOCOLS)
        if port.name is None:
            yield f"ports[{index}].name: missing, so this port is not served"
        if port.port:
            objects.within(f"ports[{index}].port", port.port, addresses.PORTS)
        else:
            yield f"ports[{index}].port: missing, so this port is not served"


def _address_warnings(found: Iterable[StoredEndpoint], family: Family) -> Iterator[str]:
    for index, each in enumerate(found):
        if each.address is None:
            yield f"endpoints[{index}].addresses: empty, so this endpoint is not served"
        elif isinstance(each.address, str):
            yield f"endpoints[{index}].addresses[0]: {_error(each.address, family)}"


def _error(text: str, family: Family) -> ValueError | None:
    try:
        addresses.parse_address(text, family)
    except ValueError as error:
        return error
    return None
