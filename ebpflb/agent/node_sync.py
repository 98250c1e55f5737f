# SPDX-License-Identifier: Apache-2.0
"""What this machine and its Node are: its addresses, devices, ranges and settings.

It is small, so it is worked out whole wherever any of it is news; the maps see only what differs.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ebpflb.agent.parts import do_all
from ebpflb.configuration import families
from ebpflb.configuration.families import NodeFamilies
from ebpflb.configuration.fields import KubeProxyConfiguration
from ebpflb.datapath.datapath import Datapath
from ebpflb.model import devices, nodeport_addresses, nodes
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Kind
from ebpflb.node.device_watch import DevicesChanged
from ebpflb.node.ip_families import supported_families
from ebpflb.options import Options
from ebpflb.plan.desired_node import DesiredNode
from ebpflb.plan.entries import Prefix
from ebpflb.plan.prefixes import service_range
from ebpflb.serve import status
from ebpflb.serve.status import AgentStatus

_UNATTACHED = "device %s: %s; its packets are not served"


class Machine:
    """Writes what is known of this node; ``here`` is what the kernel last told of its devices."""

    def __init__(
        self, options: Options, datapath: Datapath, cluster: ClusterState, words: AgentStatus
    ) -> None:
        self.options = options
        self.datapath = datapath
        self.cluster = cluster
        self.words = words
        self.here = DevicesChanged(())
        self.attached = False  # what programs there are, are in force
        self.listening: dict[Family, frozenset[Address]] = {}  # health ports; missing: anywhere
        self._local = self._work_out()
        self._written: object = None  # what the maps and programs of this node follow

    def check_families(self) -> None:
        """Raises ConfigurationError for addresses with which this Node could serve nothing."""
        found, primary = self.options.configuration, next(iter(self.cluster.primary), None)
        if primary is not None and isinstance(found, KubeProxyConfiguration):
            families.enforce(found, NodeFamilies(primary, supported_families(), self._pod_cidrs()))

    @property
    def is_news(self) -> bool:
        """Whether anything is otherwise than it was when it was last written."""
        return self._found() != self._written

    def write(self, span: Mapping[Family, Prefix]) -> None:
        """All of it. What cannot be written, as into a map that is full, keeps nothing else back.

        Raises KernelError; then all of it is still news.
        """
        found, self._local = self._found(), self._work_out()
        where = self.here.addresses, self.options.nodeport_addresses, self.cluster.primary
        self.listening = nodeport_addresses.health_check_addresses(*where)
        small: dict[str, dict[Any, Any]] = {
            "node_addresses": dict.fromkeys(nodeport_addresses.served_addresses(*where), 1),
            "devices": self._local.devices(),
            **self._ranges(),
        }
        holding = [partial(self.datapath.hold, name, wanted) for name, wanted in small.items()]
        do_all([*holding, partial(self.write_settings, span), self._follow])
        self._written = found

    def write_settings(self, span: Mapping[Family, Prefix]) -> None:
        """``span`` covers all that is planned: before that is written."""
        self.datapath.set(self._local.settings(self.options.fields, span))

    def attach(self) -> None:
        """Puts the loaded programs in force, if there are any. Raises KernelError."""
        if self.datapath.programs:
            self._report(self.datapath.attach(self.options.cgroup, self._local.served))
        self.attached = True

    def restore(self) -> None:
        """Puts back what others took off devices. Raises KernelError."""
        if self.attached and self.datapath.programs:
            self._report(self.datapath.restore(self._local.served))

    def _found(self) -> object:
        cluster = self.cluster
        return self.here, cluster.node, cluster.service_cidrs, frozenset(cluster.listed)

    def _ranges(self) -> dict[str, dict[Any, Any]]:
        """Nothing before they are known."""
        if Kind.SERVICE_CIDR not in self.cluster.listed:
            return {}
        ranges = map(service_range, self.cluster.service_cidrs)
        return {"service_ranges": dict.fromkeys(ranges, 1)}

    def _follow(self) -> None:
        if self.attached and self.datapath.programs:
            self._report(self.datapath.follow(self._local.served))

    def _work_out(self) -> DesiredNode:
        every, primary = self.here.devices, self.cluster.primary
        served = devices.served(every, self.options.devices)
        return DesiredNode(every, served, primary, self.options.detector, self._pod_cidrs())

    def _pod_cidrs(self) -> tuple[Network, ...]:
        node = self.cluster.node
        return nodes.pod_cidrs(node) if node else ()

    def _report(self, failed: dict[str, str]) -> None:
        self.words.unattached = status.renew(self.words.unattached, failed, _UNATTACHED)
