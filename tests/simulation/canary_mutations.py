# SPDX-License-Identifier: Apache-2.0
"""Deliberate bugs in the service ports of `ebpflb doctor`."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from ebpflb.agent import canary_sync
from ebpflb.agent.canary_sync import CanarySync
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.model.services import PortName
from ebpflb.plan import canary
from ebpflb.plan.canary import CanaryLease
from ebpflb.plan.desired import DesiredService
from tests.simulation.write_mutations import Mutation


def canaries_serve_everybody() -> Any:
    """The canary serves other clients than doctor's."""

    def service_ports(nodeport: int) -> dict[PortName, DesiredService]:
        return {
            name: replace(
                each, frontends={k: v - {"restricted"} for k, v in each.frontends.items()}
            )
            for name, each in _service_ports(nodeport).items()
        }

    return patch.object(canary_sync, "service_ports", service_ports)


_service_ports = canary.service_ports


def canaries_outlive_their_lease() -> Any:
    """The canary stays if doctor is killed."""

    def hold(self: CanarySync, nodeport: int) -> CanaryLease:
        lease = _hold(self, nodeport)
        self.due += 3600
        return lease

    return patch.object(CanarySync, "hold", hold)


_hold = CanarySync.hold


def canaries_go_before_services() -> Any:
    """A Service that claims the canary's NodePort does not get it. (Services of the simulation have
    no age, so names decide.)
    """
    return patch.multiple(canary, _YOUNGEST="", NAMESPACE="_doctor")


def canaries_that_do_not_go_are_forgotten() -> Any:
    """A canary that was withdrawn is still planned."""

    def write_canary(self: ServiceSync, wanted: Any) -> str | None:
        return _write_canary(self, wanted) if wanted else None

    return patch.object(ServiceSync, "write_canary", write_canary)


_write_canary = ServiceSync.write_canary

OF_CANARIES: list[Mutation] = [
    canaries_serve_everybody, canaries_outlive_their_lease, canaries_go_before_services,
    canaries_that_do_not_go_are_forgotten,
]  # fmt: skip
