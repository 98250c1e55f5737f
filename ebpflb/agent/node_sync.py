# SPDX-License-Identifier: Apache-2.0
"""Writes what the datapath knows of this node: addresses, devices, service ranges and settings.

It is little data: if any input changed, all of it is computed again, and only differences are
written to the maps.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from ebpflb.agent.engine_choice import EngineChoice
from ebpflb.configuration import families
from ebpflb.configuration.families import NodeFamilies
from ebpflb.configuration.fields import KubeProxyConfiguration
from ebpflb.datapath.datapath import Datapath
from ebpflb.datapath.maps.layout import MAPS
from ebpflb.datapath.programs.program_set import ProgramSet
from ebpflb.errors import KernelError, NodeError
from ebpflb.model import devices, nodeport_addresses, nodes
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.drift import Drift, Part
from ebpflb.model.events import Kind
from ebpflb.model.packet_path import PacketPath
from ebpflb.node.device_watch import DevicesChanged
from ebpflb.node.flowtable_sync import FlowtableSync
from ebpflb.node.ip_families import supported_families
from ebpflb.options import ConntrackOptions, Options
from ebpflb.plan.comparison import DIFFERS, NOT_PLANNED, key_text
from ebpflb.plan.desired_node import DesiredNode
from ebpflb.plan.entries import Prefix
from ebpflb.plan.expiry import Timeouts
from ebpflb.plan.prefixes import service_range
from ebpflb.serve.status import log_new

log = logging.getLogger(__name__)

Covering = Callable[[], Mapping[Family, Prefix]]
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


@cache
def flow_timeouts(chosen: ConntrackOptions) -> Timeouts:
    """Those of the packet path's flows, for the sweeps and for the programs."""
    return Timeouts(chosen.established, chosen.close_wait, chosen.udp, chosen.udp_stream)


class NodeSync:
    """``device_list`` is the last one of the device watch; it is written by ``write``.
    ``engine`` chooses what translates flows, at each ``write``; it is written with the settings.
    ``flowtable`` is told of devices and addresses, and by ServiceSync of frontends.
    """

    def __init__(
        self,
        options: Options,
        datapath: Datapath,
        cluster: ClusterState,
        engine: EngineChoice,
        flowtable: FlowtableSync | None = None,
    ) -> None:
        self.options = options
        self.datapath = datapath
        self.cluster = cluster
        self.engine = engine
        self.flowtable = flowtable or FlowtableSync(chosen=False)
        self.device_list = DevicesChanged(())
        self.attached = False  # the loaded programs, or an earlier agent's, are attached
        self.not_served: Mapping[str, str] = {}  # device -> why its packets are not served
        # Where health-check node ports listen; of a family that is missing, on all addresses.
        self.health_check_addresses: dict[Family, frozenset[Address]] = {}
        self._desired = self._desired_node()
        self._written: object = None  # the inputs of the last ``write``
        self._served: set[int] = set()  # devices that have programs
        self._has_new_devices = False

    @property
    def packet_path(self) -> PacketPath | None:
        """The engine that translates new flows; None before the first ``write``."""
        return self.engine.path

    def check_families(self) -> None:
        """Raises ConfigurationError for addresses with which this Node could serve nothing."""
        found, primary = self.options.configuration, next(iter(self.cluster.primary), None)
        if primary is not None and isinstance(found, KubeProxyConfiguration):
            families.enforce(found, NodeFamilies(primary, supported_families(), self._pod_cidrs()))

    @property
    def changed(self) -> bool:
        """Whether anything differs from what was written last.

        What equals it is kept in its place: the next comparison finds the same objects.
        """
        inputs = self._inputs()
        if inputs != self._written:
            return True
        self._written = inputs
        return False

    def write(self, covering: Mapping[Family, Prefix]) -> None:
        """Writes all of it. A map that cannot be written keeps nothing else from being written.

        Raises KernelError; then ``changed`` stays true.
        """
        inputs, self._desired = self._inputs(), self._desired_node()
        self._choose_engine()
        contents = self._contents()
        maps = [partial(self.datapath.write_map, name, wanted) for name, wanted in contents.items()]
        do_all([*maps, partial(self.write_settings, covering), self._serve_devices])
        self.flowtable.place(self._desired.served, contents["node_addresses"])
        self._written = inputs

    def differences(self, covering: Covering) -> Iterator[list[Drift]]:
        """What differs in the maps from what ``write`` has written, map by map.

        Ends where that is to be written anew. Raises KernelError.
        """
        for name in list(self._contents()):
            if self.changed:
                return
            yield list(self._map_differences(name))
        if not self.changed:
            fields = self.datapath.settings_difference(self._settings(covering()))
            yield [Drift(Part.MAP, f"map settings: {name}", DIFFERS) for name in fields]
        if self.datapath.secret_differs():
            yield [Drift(Part.MAP, "map secret: #0", DIFFERS)]
        wrong = self.datapath.no_frontends.wrong()
        yield [Drift(Part.MAP, f"map no_frontends: #{at}", DIFFERS) for at in wrong]

    def _map_differences(self, name: str) -> Iterator[Drift]:
        new, removed = self.datapath.map_difference(name, self._contents()[name])
        for key, _ in new:
            yield Drift(Part.MAP, f"map {name}: {key_text(key)}", DIFFERS)
        for key in removed:
            yield Drift(Part.MAP, f"map {name}: {key_text(key)}", NOT_PLANNED)

    def repair(self, covering: Mapping[Family, Prefix]) -> None:
        """Writes all of it again. Raises KernelError."""
        if self.datapath.secret_differs():
            self.datapath.restore_secret()
        self.datapath.no_frontends.repair()
        self.write(covering)

    def _contents(self) -> dict[str, dict[Any, Any]]:
        """Map -> what it is to hold."""
        addresses, primary = self.device_list.addresses, self.cluster.primary
        where = addresses, self.options.nodeport_addresses, primary
        self.health_check_addresses = nodeport_addresses.health_check_addresses(*where)
        serving = nodeport_addresses.served_addresses(*where)
        return {
            "node_addresses": dict.fromkeys(serving, 1),
            "own_addresses": dict.fromkeys(devices.own_addresses(addresses) | serving, 1),
            "link_addresses": self._desired.link_addresses(),
            "devices": self._desired.devices(),
            "route_sources": self._desired.sources_by_route(MAPS["route_sources"].entries),
            "timeouts": flow_timeouts(self.options.conntrack).table,
            **self._service_ranges(),
        }

    def write_settings(self, covering: Mapping[Family, Prefix]) -> None:
        """``covering``: prefixes that hold every planned cluster IP; written before the plan."""
        self.datapath.write_settings(self._settings(covering))

    def _settings(self, covering: Mapping[Family, Prefix]) -> dict[str, Any]:
        chosen = self.options.map_settings | flow_timeouts(self.options.conntrack).settings
        chosen["flags"] |= self.engine.flags
        return self._desired.settings(chosen, covering)

    def programs_loaded(self) -> None:
        """Others than those that are attached: ``attach`` is to be called, and all written."""
        self.attached, self._written = False, None

    def attach(self) -> None:
        """Puts the loaded programs in force, if there are any. Raises KernelError."""
        if self.datapath.programs:
            self._set_not_served(self.datapath.attach(self.options.cgroup, self._desired.served))
        self.attached = True

    @property
    def monitor(self) -> str | None:
        """What a monitor has put in force, if one runs."""
        return "runs: the programs tell their decisions" if self.datapath.others else None

    def require_own_programs(self) -> None:
        """Raises NodeError where no programs of this agent are in force to be exchanged."""
        if not self.attached or not self.datapath.programs:
            raise NodeError("the agent's programs are not in force yet: see `ebpflb status`")

    def exchange(self, others: ProgramSet | None) -> None:
        """Puts other programs in force, or the usual ones again. Raises NodeError, KernelError."""
        if others:
            self.require_own_programs()
        served = self._desired.served
        self._set_not_served(self.datapath.exchange(others, self.options.cgroup, served))

    def choose_engine(self) -> None:
        """By what is on the node now; ``changed`` is true if the engine is another one."""
        if self.attached and self._choose_engine():
            self._written = None

    def faults(self) -> Iterator[Iterable[Drift]]:
        """What is not attached or pinned as it was left, bit by bit. Raises KernelError."""
        return self.datapath.faults(self.options.cgroup, self._desired.served)

    def restore(self) -> None:
        """Puts that back. Raises KernelError, and NodeError without a state directory."""
        self._set_not_served(self.datapath.restore(self.options.cgroup, self._desired.served))

    def _serve_devices(self) -> None:
        if self.attached and self.datapath.programs:
            self._set_not_served(self.datapath.attach_devices(self._desired.served))
            served = {device.index for device in self._desired.served}
            self._has_new_devices |= not served <= self._served
            self._served = served

    def take_new_devices(self) -> bool:
        """Whether devices got programs since the last call: packets may have come before that."""
        found, self._has_new_devices = self._has_new_devices, False
        return found

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
        where = known, served, primary, self.options.detector, self._pod_cidrs()
        return DesiredNode(*where, self.device_list.route_sources)

    def _choose_engine(self) -> bool:
        pods = (*self.options.detector.cluster_cidrs, *self._pod_cidrs())
        return self.engine.update(self.device_list.devices, pods)

    def _pod_cidrs(self) -> tuple[Network, ...]:
        node = self.cluster.node
        return nodes.pod_cidrs(node) if node else ()

    def _set_not_served(self, reasons: Mapping[str, str]) -> None:
        log_new(self.not_served, reasons, _NOT_SERVED)
        self.not_served = reasons
