# SPDX-License-Identifier: Apache-2.0
"""One Service -> what its health-check node port answers (kube-proxy.md 10).

A load balancer that sends traffic only to nodes with endpoints (externalTrafficPolicy Local) asks
each node on this port whether it has any. Only ready endpoints count: terminating ones may still
serve, but are to get no new connections.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ebpflb.model import endpoints
from ebpflb.model.addresses import Address, Family
from ebpflb.model.endpoint_slices import StoredSlice
from ebpflb.model.services import ServicePort


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """``local_endpoints``: how many there are, by family, for the families of the Service."""

    port: int
    local_endpoints: Mapping[Family, int]


def health_check(
    ports: Collection[ServicePort], slices: Collection[StoredSlice], node_name: str
) -> HealthCheck | None:
    """None for a Service without such a port; all ``ports`` and ``slices`` are of one Service.

    Endpoints of weight 0 get nothing new, so they do not count.
    """
    checked = [port for port in ports if port.health_check_node_port]
    if not checked:
        return None
    found: dict[Family, set[Address]] = {port.name.family: set() for port in checked}
    for port in checked:
        merged = endpoints.merge(slices, port.name, node_name)
        serving = (each for each in merged if each.ready and each.local and each.weight)
        found[port.name.family] |= {each.address for each in serving}
    return HealthCheck(checked[0].health_check_node_port, {f: len(found[f]) for f in sorted(found)})
