# SPDX-License-Identifier: Apache-2.0
"""A second implementation of the decisions, small and slow, written from the documents, not from
the C code.

A ``Cluster`` knows services by their names; ``decide`` returns where a request goes, and keeps the
state that the datapath has to keep.
"""

from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.packet_path import KERNEL_UDP_TIMEOUT
from tests.native.node import HOST

PASSED, REFUSED, NO_LOCAL_ENDPOINT = "passed", "refused", "no_local_endpoint"


class Service(NamedTuple):
    """A service port: its lists, and whether each frontend is external, and has policy Local."""

    number: int
    frontends: dict[tuple[Address, int, str], tuple[bool, bool]]
    cluster: tuple[str, ...]
    local: tuple[str, ...]
    leaving: tuple[str, ...]
    affinity: int


class Request(NamedTuple):
    socket: int
    netns: int
    protocol: str
    address: Address
    port: int


def plain(address: Address) -> Address:
    """Return an IPv4-mapped address as the IPv4 address."""
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


@dataclass
class Cluster:
    """The published services and the decisions so far; time in seconds."""

    node_addresses: frozenset[Address]
    services: dict[int, Service] = field(default_factory=dict)
    affinity: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    flows: dict[tuple[int, Address, int], tuple[int, str, int]] = field(default_factory=dict)

    def decide(self, request: Request, now: int, number: int) -> str:
        """Return the backend's place, or the reason why there is none; ``number`` is the random
        number.

        A socket that gets no backend is connected elsewhere, and has no flow any more.
        """
        request = request._replace(address=plain(request.address))
        decided = self._decided(request, now, number)
        if request.protocol == "udp" and decided in (PASSED, REFUSED, NO_LOCAL_ENDPOINT):
            self.flows = {key: kept for key, kept in self.flows.items() if key[0] != request.socket}
        return decided

    def _decided(self, request: Request, now: int, number: int) -> str:
        found = self.find(request)
        if found is None:
            return PASSED
        service, external, is_local = found
        flow = (request.socket, request.address, request.port)
        if request.protocol == "udp" and self.is_kept(flow, service, now):
            self.flows[flow] = (*self.flows[flow][:2], now)
            return self.flows[flow][1]
        listed = service.local if is_local and not external else service.cluster
        if not listed:
            return NO_LOCAL_ENDPOINT if service.cluster or service.local else REFUSED
        backend = self.choose(service, listed, request.netns, now, number)
        if request.protocol == "udp":
            self.flows[flow] = (service.number, backend, now)
        return backend

    def find(self, request: Request) -> tuple[Service, bool, bool] | None:
        nowhere: Address = IPv4Address(0) if request.address.version == 4 else IPv6Address(0)
        wanted = [] if request.address == nowhere else [request.address]
        if self.serves_node_ports(request):
            wanted.append(nowhere)
        for address in wanted:
            for service in self.services.values():
                kind = service.frontends.get((address, request.port, request.protocol))
                if kind:
                    return service, *kind
        return None

    def serves_node_ports(self, request: Request) -> bool:
        if request.address.is_loopback or request.address.is_unspecified:
            return request.netns == HOST
        return request.address in self.node_addresses

    def is_kept(self, flow: tuple[int, Address, int], service: Service, now: int) -> bool:
        number, backend, last = self.flows.get(flow, (0, "", 0))
        serving = {*service.cluster, *service.local, *service.leaving}
        return number == service.number and backend in serving and now - last < KERNEL_UDP_TIMEOUT

    def choose(
        self, service: Service, listed: tuple[str, ...], netns: int, now: int, number: int
    ) -> str:
        backend, last = self.affinity.get((netns, service.number), ("", 0))
        if not (service.affinity and backend in listed and now - last <= service.affinity):
            backend = listed[number * len(listed) >> 32]
        if service.affinity:
            self.affinity[netns, service.number] = (backend, now)
        return backend
