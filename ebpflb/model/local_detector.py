# SPDX-License-Identifier: Apache-2.0
"""Which traffic comes from pods of the cluster (kube-proxy.md 5.2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ebpflb.model.addresses import Network
from ebpflb.model.devices import Device, with_masters


class LocalMode(StrEnum):
    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE = "BridgeInterface"
    NAME_PREFIX = "InterfaceNamePrefix"


@dataclass(frozen=True)
class LocalDetector:
    """One mode and its parameters; the default takes no traffic for that of pods."""

    mode: LocalMode = LocalMode.CLUSTER_CIDR
    cluster_cidrs: tuple[Network, ...] = ()
    bridge: str = ""
    name_prefix: str = ""

    def networks(self, pod_cidrs: tuple[Network, ...]) -> tuple[Network, ...]:
        """The source addresses of pods; ``pod_cidrs`` are those of this node."""
        by_mode = {LocalMode.CLUSTER_CIDR: self.cluster_cidrs, LocalMode.NODE_CIDR: pod_cidrs}
        return by_mode.get(self.mode, ())

    @property
    def by_device(self) -> bool:
        return self.mode in (LocalMode.BRIDGE, LocalMode.NAME_PREFIX)

    def is_pod_device(self, device: Device, known: Mapping[int, Device]) -> bool:
        """Whether traffic that comes in by the device, or by its master, is of pods."""
        names = [each.name for each in with_masters(device, known)]
        if self.mode is LocalMode.BRIDGE:
            return self.bridge in names
        return self.mode is LocalMode.NAME_PREFIX and any(
            n.startswith(self.name_prefix) for n in names
        )
