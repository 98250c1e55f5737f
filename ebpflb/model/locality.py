# SPDX-License-Identifier: Apache-2.0
"""Who counts as a pod: how the cluster's own traffic is told from others' (kube-proxy.md 5.2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ebpflb.model.addresses import Network
from ebpflb.model.devices import Device, upwards


class Mode(StrEnum):
    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE = "BridgeInterface"
    NAME_PREFIX = "InterfaceNamePrefix"


@dataclass(frozen=True)
class Detector:
    """One mode and what it goes by; the default tells nobody from anybody."""

    mode: Mode = Mode.CLUSTER_CIDR
    cluster_cidrs: tuple[Network, ...] = ()
    bridge: str = ""
    name_prefix: str = ""

    def networks(self, pod_cidrs: tuple[Network, ...]) -> tuple[Network, ...]:
        """Pods by their source address; ``pod_cidrs`` are those of this node."""
        by_mode = {Mode.CLUSTER_CIDR: self.cluster_cidrs, Mode.NODE_CIDR: pod_cidrs}
        return by_mode.get(self.mode, ())

    @property
    def by_device(self) -> bool:
        return self.mode in (Mode.BRIDGE, Mode.NAME_PREFIX)

    def is_pods(self, device: Device, known: Mapping[int, Device]) -> bool:
        """Whether what comes in by the device, or by one enslaved to the one that is meant, is."""
        names = [each.name for each in upwards(device, known)]
        if self.mode is Mode.BRIDGE:
            return self.bridge in names
        return self.mode is Mode.NAME_PREFIX and any(n.startswith(self.name_prefix) for n in names)
