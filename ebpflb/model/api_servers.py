# SPDX-License-Identifier: Apache-2.0
"""The cluster's API servers: the endpoints of the Service ``default/kubernetes``.

They are kept as they were last received, for an agent that starts before an API server answers it,
and for its own requests when its own servers are gone.
"""

from collections import defaultdict
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from ebpflb.model import objects
from ebpflb.model.addresses import host_port
from ebpflb.model.endpoint_slices import SERVICE_LABEL, StoredSlice
from ebpflb.model.endpoints import NONE_SET_ASIDE, SetAside, UnusedReason
from ebpflb.model.events import Key, Kind, ReadObject, Replaced
from ebpflb.model.services import API_SERVERS, PortName, ServicePort

KUBERNETES = Key(*API_SERVERS[:2])
_PORT = API_SERVERS[2]
_Port = Annotated[int, Meta(gt=0, lt=1 << 16)]


Place = tuple[str, int]  # of an API server: its address and port


class Silent(NamedTuple):
    """The API servers that do not answer this node now: a message to the agent's loop."""

    places: frozenset[Place]


class KeptApiServers(Struct, frozen=True):
    """The Service's cluster IPs and port, and its ready endpoints: address and port."""

    cluster_ips: tuple[str, ...]
    port: _Port
    endpoints: tuple[tuple[str, _Port], ...]  # of type Place

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid address, as a file may contain."""
        for address in (*self.cluster_ips, *(address for address, _ in self.endpoints)):
            ip_address(address)

    @property
    def urls(self) -> list[str]:
        return [
            f"https://{host_port(ip_address(address), port)}" for address, port in self.endpoints
        ]


def has_ready(slice: StoredSlice) -> bool:
    """Whether a client could be sent to an endpoint of the slice."""
    return any(each.conditions.ready for each in slice.endpoints)


def set_aside(name: PortName, silent: frozenset[Place]) -> SetAside:
    """Return the silent API servers as endpoints of a service port, which may be another's."""
    if name[:-1] != API_SERVERS:
        return NONE_SET_ASIDE
    return {(ip_address(address), port): UnusedReason.SILENT for address, port in silent}


def keep(ports: Iterable[ServicePort], slices: Iterable[StoredSlice]) -> KeptApiServers | None:
    """Return what is to be kept; None if the Service or its endpoints are not known."""
    served = [port for port in ports if port.name.port == _PORT]
    endpoints = {
        (str(each.address), number)
        for slice in slices
        for number in slice.ports.get((_PORT, "TCP"), ())
        for each in slice.endpoints
        if each.conditions.ready and slice.family and not isinstance(each.address, str | None)
    }
    if not (served and endpoints):
        return None
    ips = tuple(str(port.cluster_ip) for port in served)
    return KeptApiServers(ips, served[0].port, tuple(sorted(endpoints)))


def as_lists(kept: KeptApiServers, source: str) -> list[Replaced]:
    """Return what the cluster would say if it had this Service alone; ``source`` is for the log."""
    slices = dict(_slice(*each, source) for each in _by_port(kept).items())
    return [
        Replaced(Kind.SERVICE, {KUBERNETES: ReadObject(_service(kept), source)}),
        Replaced(Kind.ENDPOINT_SLICE, slices),
    ]


def _by_port(kept: KeptApiServers) -> dict[tuple[str, int], list[str]]:
    """Group the addresses by type and port, as each slice has one of both."""
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for address, port in kept.endpoints:
        found[_family(address), port].append(address)
    return found


def _family(address: str) -> str:
    return "IPv6" if ":" in address else "IPv4"


def _service(kept: KeptApiServers) -> objects.Service:
    port = {"name": _PORT, "port": kept.port, "protocol": "TCP"}
    ips = list(kept.cluster_ips)
    spec: dict[str, Any] = {"clusterIP": ips[0], "clusterIPs": ips, "ports": [port]}
    spec["ipFamilies"] = list(map(_family, ips))
    return msgspec.convert({"metadata": _metadata(), "spec": spec}, objects.Service)


def _slice(about: tuple[str, int], addresses: list[str], source: str) -> tuple[Key, ReadObject]:
    kind, port = about
    name = f"kept-{kind.lower()}-{port}"
    made: dict[str, Any] = {
        "metadata": {**_metadata(name), "labels": {SERVICE_LABEL: KUBERNETES.name}},
        "addressType": kind,
        "endpoints": [{"addresses": [address]} for address in addresses],
        "ports": [{"name": _PORT, "port": port, "protocol": "TCP"}],
    }
    found = msgspec.convert(made, objects.EndpointSlice)
    return Key(KUBERNETES.namespace, name), ReadObject(found, source)


def _metadata(name: str = KUBERNETES.name) -> dict[str, str]:
    return {"namespace": KUBERNETES.namespace, "name": name}
