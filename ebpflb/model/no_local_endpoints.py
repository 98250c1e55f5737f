# SPDX-License-Identifier: Apache-2.0
"""Counts service ports that a policy Local leaves without an endpoint on this node.

kube-proxy.md 14: the policy is Local and there are endpoints somewhere, but none on this node.
"""

from collections import Counter
from enum import StrEnum

from ebpflb.model.addresses import Family
from ebpflb.model.selection import Selection
from ebpflb.model.services import PortName, ServicePort


class TrafficPolicy(StrEnum):
    """Of traffic to the cluster IP, or to all other frontends."""

    INTERNAL = "internal"
    EXTERNAL = "external"


def policies_without_endpoints(port: ServicePort, selection: Selection) -> frozenset[TrafficPolicy]:
    """The policies that are Local and have no endpoint here, but elsewhere."""
    if selection.local or not selection.has_any:
        return frozenset()
    external = port.external_local and port.externally_accessible
    local = {TrafficPolicy.INTERNAL: port.internal_local, TrafficPolicy.EXTERNAL: external}
    return frozenset(policy for policy, is_local in local.items() if is_local)


class NoLocalEndpoints:
    """How many there are of each policy and family; an update takes constant time."""

    def __init__(self) -> None:
        self._policies: dict[PortName, frozenset[TrafficPolicy]] = {}
        self._counts: Counter[tuple[TrafficPolicy, Family]] = Counter()

    def update(self, name: PortName, policies: frozenset[TrafficPolicy]) -> None:
        """The policies of a service port that have no endpoint now; none if it is deleted."""
        former = self._policies.pop(name, None)
        if not former and not policies:  # as of nearly all service ports
            return
        self._counts.subtract((policy, name.family) for policy in former or ())
        self._counts.update((policy, name.family) for policy in policies)
        if policies:
            self._policies[name] = policies

    @property
    def counts(self) -> dict[TrafficPolicy, dict[Family, int]]:
        """For every policy and family, even if it is 0."""
        return {p: {family: self._counts[p, family] for family in Family} for p in TrafficPolicy}
