# SPDX-License-Identifier: Apache-2.0
"""The datapath's look-ups in Python, and which sockets they show to be stale.

Each look-up is named after the C function with the same result; tests/native/test_lookups.py
compares them with the C code. The maps are read while they are written. A service that changes
meanwhile is seen in its old or new state, because its former slots stay in quarantine; if slots
were nevertheless given to another service, the socket counts as served.
"""

from collections.abc import Mapping

from ebpflb.entries.services import Backend, Frontend, Range, ServiceEntry, Settings, SourceRange
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import PeerFrontend
from ebpflb.model.addresses import Address, family
from ebpflb.model.services import Protocol
from ebpflb.plan.desired import ANY, IN_LISTS

Maps = Mapping[str, Map]


_WHOLE_ADDRESS = 64 + 128  # bits: the service's id, the NodePort field, and the address


def service_find(maps: Maps, frontend: Frontend) -> ServiceEntry | None:
    """Return the service of a frontend, for a socket in the node's own network namespace.

    Other namespaces differ only in that loopback serves no NodePorts there, so none of their
    sockets ever gets a backend for a loopback address. bpf/rules/frontend.h.
    """
    service: ServiceEntry | None = None
    if not frontend.address.is_unspecified:
        service = maps["services"].get(frontend)
    if service is None and node_serves(maps, frontend.address):
        nodeport = frontend._replace(address=ANY[family(frontend.address)])
        service = maps["services"].get(nodeport)
    return service


def node_serves(maps: Maps, address: Address) -> bool:
    """Whether NodePorts are served at an address. bpf/rules/frontend.h."""
    if address.is_loopback or address.is_unspecified:  # Linux connects both to loopback
        return True
    return maps["node_addresses"].get(address) is not None


def policy_is_local_only(service: ServiceEntry) -> bool:
    """Whether the policy Local applies to sockets, which count as pods. bpf/rules/policy.h."""
    return "local" in service.flags and "external" not in service.flags


def policy_admits(maps: Maps, service: ServiceEntry, frontend: Frontend) -> bool:
    """Whether the service's source ranges admit the node itself. bpf/rules/policy.h."""
    settings: Settings = maps["settings"].get(0)
    node = settings.node_v4 if frontend.address.version == 4 else settings.node_v6
    nodeport = int("nodeport" in service.flags)
    key = SourceRange(_WHOLE_ADDRESS, service.id, nodeport, node)
    return maps["source_ranges"].get(key) is not None


def socket_range(service: ServiceEntry) -> Range:
    """Return the slots from which a socket gets its backend. bpf/path/select_backend.h."""
    return service.local if policy_is_local_only(service) else service.cluster


class ServedFrontends:
    """Services and their backends by frontend; each is read from the maps only once."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps
        self._known: dict[Frontend, tuple[ServiceEntry, tuple[Backend, ...]] | None] = {}

    def find(self, frontend: Frontend) -> tuple[ServiceEntry, tuple[Backend, ...]] | None:
        """Return the service and the backends in its slots; None if there is no such service."""
        if frontend not in self._known:
            service = service_find(self.maps, frontend)
            self._known[frontend] = service and (service, self._backends(service))
        return self._known[frontend]

    def serves(self, frontend: Frontend) -> bool:
        """Whether a socket of the node that connects to the frontend now gets a backend."""
        service = service_find(self.maps, frontend)
        if service is None or not socket_range(service).size:
            return False
        return "restricted" not in service.flags or policy_admits(self.maps, service, frontend)

    def is_stale(self, entry: PeerFrontend) -> bool:
        """Whether this backend no longer serves the sockets that asked for this frontend."""
        if entry.frontend.protocol != Protocol.UDP or is_untranslated(entry):
            return False
        found = self.find(entry.frontend)
        if found is None:
            return True
        service, backends = found
        return not any(
            each.service != service.id or (each.address, each.port) == (entry.address, entry.port)
            for each in backends
        )

    def may_get(self, entry: PeerFrontend) -> bool:
        """Whether a new connection to this frontend may get this endpoint."""
        _, backends = self.find(entry.frontend) or (None, ())
        return any(
            (each.address, each.port) == (entry.address, entry.port)
            and not IN_LISTS.isdisjoint(each.flags)
            for each in backends
        )

    def _backends(self, service: ServiceEntry) -> tuple[Backend, ...]:
        base, size = service.block
        return tuple(self.maps["slots"].get(base + index) for index in range(size))


def is_untranslated(entry: PeerFrontend) -> bool:
    """Whether the socket was connected without a backend, because none served (path/socket.h)."""
    return entry.backend == 0
