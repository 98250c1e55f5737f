# SPDX-License-Identifier: Apache-2.0
"""The datapath's look-ups in Python: each is named after the C function whose answer it gives.

tests/native/test_lookups.py compares them with the C code. The datapath and the agent write to
the maps meanwhile, so two look-ups may see different states.
"""

from collections.abc import Mapping

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.model.addresses import Address, family
from ebpflb.plan.desired_service import ANY
from ebpflb.plan.entries import Backend, Frontend, Range, ServiceEntry, Settings, SourceRange

Maps = Mapping[str, Map]

_WHOLE_ADDRESS = 64 + 128  # bits: the service's id, whether of its NodePort, and the address


def service_find(maps: Maps, frontend: Frontend) -> ServiceEntry | None:
    """The service of a frontend, for a socket in the node's own network namespace.

    Other namespaces differ only in that loopback serves no NodePorts there, so no socket in one
    is ever given a backend for a loopback address. bpf/rules/frontend.h.
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


def backend_find(maps: Maps, service: int, id: int) -> Backend | None:
    """The backend with this id, if it still belongs to the service. bpf/rules/backend.h."""
    slot, slots = maps["backend_slots"].get(id), maps["slots"]
    if slot >= slots.spec.entries:  # NOWHERE
        return None
    backend: Backend = slots.get(slot)
    return backend if (backend.service, backend.id) == (service, id) else None


def policy_is_local_only(service: ServiceEntry) -> bool:
    """Whether the policy Local holds for sockets, which count as pods. bpf/rules/policy.h."""
    return "local" in service.flags and "external" not in service.flags


def policy_admits(maps: Maps, service: ServiceEntry, frontend: Frontend) -> bool:
    """Whether the service's source ranges admit the node itself. bpf/rules/policy.h."""
    settings: Settings = maps["settings"].get(0)
    node = settings.node_v4 if frontend.address.version == 4 else settings.node_v6
    nodeport = int("nodeport" in service.flags)
    key = SourceRange(_WHOLE_ADDRESS, service.id, nodeport, node)
    return maps["source_ranges"].get(key) is not None


def socket_range(service: ServiceEntry) -> Range:
    """The slots from which a socket gets its backend. bpf/path/select.h."""
    return service.local if policy_is_local_only(service) else service.cluster
