# SPDX-License-Identifier: Apache-2.0
"""Writes what the datapath knows of this node: addresses, devices, service ranges and settings.

It is little data: if any input changed, all of it is computed again, and only differences are
written to the maps.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ebpflb.agent.engine_choice import EngineChoice
from ebpflb.configuration import families
from ebpflb.configuration.families import NodeFamilies
from ebpflb.configuration.fields import KubeProxyConfiguration
from ebpflb.datapath.datapath import Datapath
from ebpflb.errors import CompileError, KernelError, NodeError, VerifierError
from ebpflb.model import devices, nodeport_addresses, nodes
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Kind
from ebpflb.model.packet_path import Engine, PacketPath
from ebpflb.node.device_watch import DevicesChanged
from ebpflb.node.ip_families import supported_families
from ebpflb.options import ConntrackOptions, Options
from ebpflb.plan.desired_node import DesiredNode
from ebpflb.plan.entries import Prefix
from ebpflb.plan.expiry import Timeouts
from ebpflb.plan.prefixes import service_range
from ebpflb.serve.status import CURRENT_PROGRAMS, log_new

log = logging.getLogger(__name__)

_NOT_SERVED = "device %s: %s; its packets are not served"


def do_all(steps: Iterable[Callable[[], None]]) -> None:
    """Takes every step, in this order. Raises the first KernelError, after the last step."""
    errors = []
    for step in steps:
        try:
            step()
        except KernelError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def flow_timeouts(chosen: ConntrackOptions) -> Timeouts:
    """Those of the packet path's flows, for the sweeps and for the programs."""
    return Timeouts(chosen.established, chosen.close_wait, chosen.udp, chosen.udp_stream)


class NodeSync:
    """``device_list`` is the last one of the device watch; it is written by ``write``.

    ``engine`` chooses what opens flows, anew at each ``write``; it is written with the settings.
    """

    def __init__(
        self,
        options: Options,
        datapath: Datapath,
        cluster: ClusterState,
        engine: EngineChoice,
    ) -> None:
        self.options = options
        self.datapath = datapath
        self.cluster = cluster
        self.engine = engine
        self.device_list = DevicesChanged(())
        self.attached = False  # the loaded programs, or an earlier agent's, are attached
        self.not_served: Mapping[str, str] = {}  # device -> why its packets are not served
        # Where health-check node ports listen; of a family that is missing, on all addresses.
        self.health_check_addresses: dict[Family, frozenset[Address]] = {}
        self._desired = self._desired_node()
        self._written: object = None  # the inputs of the last ``write``

    @property
    def packet_path(self) -> PacketPath | None:
        """The engine that is to open flows; None before the first ``write``."""
        return self.engine.path

    def load_programs(self) -> str:
        """CURRENT_PROGRAMS, or that old ones keep serving, and why.

        Raises CompileError, VerifierError, KernelError or NodeError where there are no old ones.
        """
        try:
            compiled = self._load()
        except (CompileError, VerifierError, KernelError, NodeError) as error:
            if not self.datapath.is_attached():
                raise
            log.error("%s\nthe old programs keep serving", error)
            return f"old ones: {str(error).splitlines()[0]}"
        log.info("programs %s", "compiled" if compiled else "from the cache")
        return CURRENT_PROGRAMS

    def _load(self) -> bool:
        """Whether they had to be compiled. If the kernel takes only those without conntrack, auto
        is content with them.
        """
        cache, conntrack = self.options.paths.cache, self.engine.missing is None
        try:
            return self.datapath.load(cache, conntrack=conntrack)
        except (VerifierError, KernelError, NodeError) as error:
            if not conntrack or self.options.packet_path == Engine.CONNTRACK:
                raise
            reason = str(error).splitlines()[0]
        self.engine.missing = f"the programs of the conntrack engine are rejected: {reason}"
        return self.datapath.load(cache, conntrack=False)

    def check_families(self) -> None:
        """Raises ConfigurationError for addresses with which this Node could serve nothing."""
        found, primary = self.options.configuration, next(iter(self.cluster.primary), None)
        if primary is not None and isinstance(found, KubeProxyConfiguration):
            families.enforce(found, NodeFamilies(primary, supported_families(), self._pod_cidrs()))

    @property
    def changed(self) -> bool:
        """Whether anything differs from what was written last."""
        return self._inputs() != self._written

    def write(self, covering: Mapping[Family, Prefix]) -> None:
        """Writes all of it. A map that cannot be written keeps nothing else from being written.

        Raises KernelError; then ``changed`` stays true.
        """
        inputs, self._desired = self._inputs(), self._desired_node()
        self._choose_engine()
        addresses, primary = self.device_list.addresses, self.cluster.primary
        where = addresses, self.options.nodeport_addresses, primary
        self.health_check_addresses = nodeport_addresses.health_check_addresses(*where)
        serving = nodeport_addresses.served_addresses(*where)
        contents: dict[str, dict[Any, Any]] = {
            "node_addresses": dict.fromkeys(serving, 1),
            "own_addresses": dict.fromkeys(devices.own_addresses(addresses) | serving, 1),
            "devices": self._desired.devices(),
            "timeouts": flow_timeouts(self.options.conntrack).table,
            **self._service_ranges(),
        }
        maps = [partial(self.datapath.write_map, name, wanted) for name, wanted in contents.items()]
        do_all([*maps, partial(self.write_settings, covering), self._serve_devices])
        self._written = inputs

    def write_settings(self, covering: Mapping[Family, Prefix]) -> None:
        """``covering``: prefixes that hold every planned cluster IP; written before the plan."""
        chosen = self.options.map_settings | flow_timeouts(self.options.conntrack).settings
        if self.engine.is_conntrack:
            chosen["flags"] |= {"conntrack"}
        self.datapath.write_settings(self._desired.settings(chosen, covering))

    def attach(self) -> None:
        """Puts the loaded programs in force, if there are any. Raises KernelError."""
        if self.datapath.programs:
            self._set_not_served(self.datapath.attach(self.options.cgroup, self._desired.served))
        self.attached = True

    def restore(self) -> None:
        """Puts back what others took off devices, and chooses the engine by what is here now.

        Raises KernelError. ``changed`` is true if the engine is another one.
        """
        if self.attached and self._choose_engine():
            self._written = None
        if self.attached and self.datapath.programs:
            self._set_not_served(self.datapath.restore_devices(self._desired.served))

    def _serve_devices(self) -> None:
        if self.attached and self.datapath.programs:
            self._set_not_served(self.datapath.attach_devices(self._desired.served))

    def _inputs(self) -> object:
        """Everything that ``write`` depends on."""
        cluster = self.cluster
        return self.device_list, cluster.node, cluster.service_cidrs, frozenset(cluster.listed)

    def _service_ranges(self) -> dict[str, dict[Any, Any]]:
        """The map is left alone until the ranges are known."""
        if Kind.SERVICE_CIDR not in self.cluster.listed:
            return {}
        ranges = map(service_range, self.cluster.service_cidrs)
        return {"service_ranges": dict.fromkeys(ranges, 1)}

    def _desired_node(self) -> DesiredNode:
        known, primary = self.device_list.devices, self.cluster.primary
        served = devices.served(known, self.options.devices)
        return DesiredNode(known, served, primary, self.options.detector, self._pod_cidrs())

    def _choose_engine(self) -> bool:
        pods = (*self.options.detector.cluster_cidrs, *self._pod_cidrs())
        return self.engine.update(self.device_list.devices, pods)

    def _pod_cidrs(self) -> tuple[Network, ...]:
        node = self.cluster.node
        return nodes.pod_cidrs(node) if node else ()

    def _set_not_served(self, reasons: Mapping[str, str]) -> None:
        log_new(self.not_served, reasons, _NOT_SERVED)
        self.not_served = reasons
