# SPDX-License-Identifier: Apache-2.0
"""The cluster's API servers: the endpoints of the Service ``default/kubernetes``.

They are kept as they were last received: the agent asks them when its own servers are gone.

No Service takes their addresses and ports, nor those by which this agent reaches the API otherwise:
an agent whose requests end at a pod would never hear that the Service was deleted.
"""

from collections.abc import Collection, Iterable
from ipaddress import ip_address
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from ebpflb.model.addresses import Address, host_port
from ebpflb.model.endpoint_slices import StoredSlice
from ebpflb.model.events import Key
from ebpflb.model.services import API_SERVERS, KUBERNETES

_PORT = API_SERVERS[2]
_Port = Annotated[int, Meta(gt=0, lt=1 << 16)]


class ApiPlaces(NamedTuple):
    """The addresses and TCP ports that no Service takes by an external address or a NodePort.

    In ``taken`` the unspecified address stands for a NodePort. ``servers`` are the endpoints of
    default/kubernetes: a Service that leads to these alone may have the places.
    """

    taken: frozenset[tuple[Address, int]] = frozenset()
    servers: frozenset[tuple[Address, int]] = frozenset()

    def are_free_for(self, service: Key, endpoints: Collection[tuple[Address, int]]) -> bool:
        """Whether a Service with these endpoints may have the places."""
        return service == KUBERNETES or (bool(endpoints) and self.servers.issuperset(endpoints))


NO_API_PLACES = ApiPlaces()


def api_places(
    reached: frozenset[tuple[Address, int]],
    servers: frozenset[tuple[Address, int]],
    own: frozenset[Address],
) -> ApiPlaces:
    """Return the places; ``own`` are this node's addresses, at which NodePorts answer."""
    at = reached | servers
    nodeports = {(type(ip)(0), port) for ip, port in at if ip.is_loopback or ip in own}
    return ApiPlaces(at | nodeports, servers)


class KeptApiServers(Struct, frozen=True):
    """Address and port of each ready endpoint of the Service default/kubernetes."""

    endpoints: tuple[tuple[str, _Port], ...]

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid address, as a file may contain."""
        for address, _ in self.endpoints:
            ip_address(address)

    @property
    def urls(self) -> list[str]:
        return [
            f"https://{host_port(ip_address(address), port)}" for address, port in self.endpoints
        ]


def has_ready(slice: StoredSlice) -> bool:
    """Whether a client could be sent to an endpoint of the slice."""
    return any(each.conditions.ready for each in slice.endpoints)


def keep(slices: Iterable[StoredSlice]) -> KeptApiServers | None:
    """Return what is to be kept; None if no endpoint is known."""
    endpoints = {(str(address), port) for address, port in endpoints_of(slices, only_ready=True)}
    return KeptApiServers(tuple(sorted(endpoints))) if endpoints else None


def endpoints_of(
    slices: Iterable[StoredSlice], *, only_ready: bool = False
) -> frozenset[tuple[Address, int]]:
    """Return the addresses and ports of the API servers in the slices of default/kubernetes."""
    return frozenset(
        (each.address, number)
        for slice in slices
        for number in slice.ports.get((_PORT, "TCP"), ())
        for each in slice.endpoints
        if slice.family and not isinstance(each.address, str | None)
        if each.conditions.ready or not only_ready
    )
