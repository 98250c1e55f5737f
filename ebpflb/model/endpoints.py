# SPDX-License-Identifier: Apache-2.0
"""The EndpointSlices of a Service -> the endpoints of one service port (kube-proxy.md 2).

A Service has any number of slices: some for each family, more for pods that resolve a named target
port to another number, and those that people wrote by hand. They are merged by port name and
protocol. If two slices hold the same endpoint, one that is not terminating is used; of several
kube-proxy may use any. Here slices are read in the order of their names and the last such endpoint
is used, so that the order of events does not matter.

Next: selection.py says which of the endpoints a service port uses.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from ebpflb.model import addresses, events, fields, objects, services
from ebpflb.model.addresses import Address, Family

SERVICE_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"  # its presence: no cluster IP, not for us

_ADDRESS_TYPES = {**addresses.FAMILIES, "FQDN": None}
_NO_HINTS: frozenset[str] = frozenset()
_DEFAULT_CONDITIONS = objects.EndpointConditions()

_by_name = attrgetter("metadata.name")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address and port; ``node`` and ``target`` (the name of a pod) may be ""."""

    address: Address
    port: int
    ready: bool
    serving: bool
    terminating: bool
    local: bool
    node: str
    target: str
    zone_hints: frozenset[str]
    node_hints: frozenset[str]


def service_of(slice: objects.EndpointSlice) -> events.Key | None:
    """The Service that a slice belongs to, by label; None when the slice is to be ignored."""
    meta = slice.metadata
    labels = meta.labels or {}
    service = labels.get(SERVICE_LABEL)
    if not service or not meta.name or not meta.namespace or HEADLESS_LABEL in labels:
        return None
    return events.Key(meta.namespace, service)


def check(slice: objects.EndpointSlice) -> tuple[str, ...]:
    """A warning for each entry that ``merge`` will skip.

    Raises InvalidObject for an invalid addressType, protocol or port number.
    """
    family = fields.one_of("addressType", slice.address_type, _ADDRESS_TYPES)
    if family is None:
        return ("addressType: FQDN endpoints are not served",)
    return (*_port_warnings(slice.ports or ()), *_endpoint_warnings(slice.endpoints or (), family))


def merge(
    slices: Iterable[objects.EndpointSlice], name: services.PortName, node_name: str
) -> tuple[Endpoint, ...]:
    """The endpoints of one service port, sorted by their "address:port" text.

    ``slices`` are all those of its Service, each one passed by ``check``, in any order.
    """
    family = str(name.family)
    found: dict[str, Endpoint] = {}
    for slice in sorted(slices, key=_by_name):
        if slice.address_type == family:
            for port in _numbers(slice, name):
                for entry in slice.endpoints or ():
                    _add(found, entry, port, name.family, node_name)
    return tuple([found[key] for key in sorted(found)])


def _numbers(slice: objects.EndpointSlice, name: services.PortName) -> Iterator[int]:
    for port in slice.ports or ():
        if port.port and port.name == name.port and _protocol(port) == name.protocol.name:
            yield port.port


def _add(
    found: dict[str, Endpoint],
    entry: objects.SliceEndpoint,
    port: int,
    family: Family,
    node_name: str,
) -> None:
    address = _address(entry, family)
    if address is None:
        return
    conditions = entry.conditions or _DEFAULT_CONDITIONS
    terminating = conditions.terminating is True
    key = f"{address}:{port}" if family == Family.IPV4 else f"[{address}]:{port}"
    if terminating and key in found:
        return
    hints = entry.hints
    node = entry.node_name or ""
    found[key] = Endpoint(
        address=address,
        port=port,
        ready=conditions.ready is not False,
        serving=conditions.serving is not False,
        terminating=terminating,
        local=node == node_name and node != "",
        node=node,
        target=entry.target_ref.name if entry.target_ref else "",
        zone_hints=_names(hints.for_zones) if hints else _NO_HINTS,
        node_hints=_names(hints.for_nodes) if hints else _NO_HINTS,
    )


def _address(entry: objects.SliceEndpoint, family: Family) -> Address | None:
    """Only the first address counts (kube-proxy.md 2)."""
    try:
        return addresses.parse_address(entry.addresses[0], family) if entry.addresses else None
    except ValueError:
        return None


def _protocol(port: objects.SlicePort) -> str:
    return "TCP" if port.protocol is None else port.protocol


def _names(hints: list[objects.Hint] | None) -> frozenset[str]:
    return _shared(tuple([hint.name for hint in hints])) if hints else _NO_HINTS


@lru_cache(maxsize=4096)
def _shared(names: tuple[str, ...]) -> frozenset[str]:
    """One set for all endpoints with the same hints, instead of 200 bytes for each."""
    return frozenset(names)


def _port_warnings(ports: Iterable[objects.SlicePort]) -> Iterator[str]:
    for index, port in enumerate(ports):
        fields.one_of(f"ports[{index}].protocol", _protocol(port), services.PROTOCOLS)
        if port.name is None:
            yield f"ports[{index}].name: missing, so this port is not served"
        if port.port:
            fields.within(f"ports[{index}].port", port.port, fields.PORTS)
        else:
            yield f"ports[{index}].port: missing, so this port is not served"


def _endpoint_warnings(entries: Iterable[objects.SliceEndpoint], family: Family) -> Iterator[str]:
    for index, entry in enumerate(entries):
        if not entry.addresses:
            yield f"endpoints[{index}].addresses: empty, so this endpoint is not served"
            continue
        try:
            addresses.parse_address(entry.addresses[0], family)
        except ValueError as error:
            yield f"endpoints[{index}].addresses[0]: {error}"
