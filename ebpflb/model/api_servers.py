# SPDX-License-Identifier: Apache-2.0
"""The cluster's API servers: the endpoints of the Service ``default/kubernetes``.

They are kept as they were last received: the agent asks them when its own servers are gone.
"""

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Annotated

from msgspec import Meta, Struct

from ebpflb.model.addresses import host_port
from ebpflb.model.endpoint_slices import StoredSlice
from ebpflb.model.services import API_SERVERS

_PORT = API_SERVERS[2]
_Port = Annotated[int, Meta(gt=0, lt=1 << 16)]


class KeptApiServers(Struct, frozen=True):
    """The Service's ready endpoints: address and port."""

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
    endpoints = {
        (str(each.address), number)
        for slice in slices
        for number in slice.ports.get((_PORT, "TCP"), ())
        for each in slice.endpoints
        if each.conditions.ready and slice.family and not isinstance(each.address, str | None)
    }
    return KeptApiServers(tuple(sorted(endpoints))) if endpoints else None
