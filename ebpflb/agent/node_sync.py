# SPDX-License-Identifier: Apache-2.0
"""Write the facts about this node for the datapath: addresses, devices, service ranges, settings.

They are little data: if any input changed, everything is computed again, and only differences are
written to the maps.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any

from ebpflb.agent.engine import EngineChoice
from ebpflb.agent.loop import Part
from ebpflb.config import validation
from ebpflb.config.fields import KubeProxyConfiguration
from ebpflb.config.validation import NodeFamilies
from ebpflb.entries.flows import Timeouts
from ebpflb.entries.services import NO_FLAGS, Prefix, Settings, service_range
from ebpflb.errors import CompileError, KernelError, NodeError, VerifierError
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.netfilter.flowtable import FlowtableSync
from ebpflb.kernel.node import sysctls
from ebpflb.kernel.node.device_watch import DevicesChanged
from ebpflb.kernel.node.sysctls import supported_families
from ebpflb.kernel.programs.loader import ProgramSet
from ebpflb.model import devices, events, nodes
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.devices import Addresses, Device, Devices
from ebpflb.model.events import Drift, Kind
from ebpflb.model.kube_proxy import DEVICE
from ebpflb.model.nodes import EachPacketRules, why_off
from ebpflb.options import HOST_SOCKETS, ConntrackOptions, Options
from ebpflb.plan.comparison import DIFFERS, NOT_PLANNED, key_text
from ebpflb.plan.desired import DesiredNode
from ebpflb.serve.status import CURRENT_PROGRAMS, FORMER_PROGRAMS, log_new

log = logging.getLogger(__name__)


def set_up_host(options: Options) -> str | None:
    """Set conntrack's settings and reserve the ports; return why ports are not reserved, or None.

    These are the agent's changes of the node besides its own maps and programs. They are made only
    when everything else is ready: the configuration can be used, the programs are loaded, and every
    map is written. Raises NodeError if a setting cannot be set.
    """
    sysctls.set_up_conntrack(options.conntrack_wanted)
    return sysctls.reserve_ports(options.paths.ports_file, *options.masquerade_ports)


Covering = Callable[[], Mapping[Family, Prefix]]
_NO_EGRESS = (
    "its qdisc ingress, as the CNI plugin bandwidth creates it, has no room for the program at "
    "egress, which the flow tables need: --packet-path=netfilter works there, and Linux 6.6"
)
# While IPVS has a connection of a pod to an endpoint, it gives the replies of another one from the
# same port, by a translated socket, the Service's address: the pod's kernel does not know them.
_HOST_SOCKETS = frozenset({"host_sockets"})
_NOT_SERVED = "device %s: %s; its packets are not served"


def do_all(steps: Iterable[Callable[[], None]]) -> None:
    """Take every step, in this order. Raises the first exception, after the last step."""
    errors = []
    for step in steps:
        try:
            step()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


@cache
def flow_timeouts(options: ConntrackOptions) -> Timeouts:
    """Return the timeouts of the packet path's flows, for the sweeps and for the programs."""
    return Timeouts(options.established, options.close_wait, options.udp, options.udp_stream)


class NodeSync(Part):
    """The facts about this node in the maps.

    ``device_list`` is the watch's last one; ``write`` writes what follows from it.
    ``engine`` is decided at each ``write`` and written with the settings. ``flowtable`` gets
    devices and addresses from here, and frontends from ServiceSync.
    """

    name = "engine"

    def __init__(
        self,
        options: Options,
        datapath: Datapath,
        cluster: ClusterState,
        engine: EngineChoice,
        flowtable: FlowtableSync | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._next_choice = clock() + options.sync_period
        self.options = options
        self.datapath = datapath
        self.cluster = cluster
        self.engine = engine
        self.flowtable = flowtable or FlowtableSync(is_wanted=False)
        self.device_list = DevicesChanged(())
        self._each_packet: EachPacketRules | None = None  # None: not known yet
        self._services_written = False  # whether every Service has been
        self.attached = False  # whether programs, loaded here or by an earlier agent, are attached
        self.not_served: Mapping[str, str] = {}  # device -> why its packets are not served
        # Where health-check node ports listen; a missing family means on all addresses.
        self.health_check_addresses: dict[Family, frozenset[Address]] = {}
        self._programmed = frozenset(datapath.devices.recorded)  # devices that have programs now
        self._ports_may_go = False  # whether ports had to wait until their masters had programs
        self._desired = self._desired_node()
        # Whether mode ipvs's device, there at the start, is still there; None: not known yet.
        self._follows_ipvs: bool | None = None
        self._own: set[int] = set()  # devices with the Node's addresses, which are to be served
        self._written: object = None  # the inputs of the last ``write``
        self._served: set[int] = set()  # devices that have programs
        self._has_new_devices = False

    def check_families(self) -> None:
        """Raise ConfigurationError for addresses with which this Node could serve nothing."""
        found, primary = self.options.configuration, next(iter(self.cluster.primary), None)
        if primary is not None and isinstance(found, KubeProxyConfiguration):
            validation.enforce_families(
                found, NodeFamilies(primary, supported_families(), self._pod_cidrs())
            )

    @property
    def changed(self) -> bool:
        """Whether anything differs from the last write.

        Equal inputs replace the stored ones, so that the next comparison finds the same objects.
        """
        inputs = self._inputs()
        if inputs != self._written or self._ports_may_go:
            return True
        self._written = inputs
        return False

    def write(self, covering: Mapping[Family, Prefix]) -> None:
        """Write everything; a map that cannot be written does not stop the others.

        Raises KernelError; then ``changed`` stays true.
        """
        inputs, self._desired = self._inputs(), self._desired_node()
        if self.device_list.devices:
            self._follows_ipvs = self._follows_ipvs is not False and self.device_list.has_ipvs
        self._own = {it.index for it in devices.of_node(self._desired.served, self.cluster.primary)}
        self._choose_engine()
        self.datapath.wants_egress = self._wants_egress
        contents = self._contents()
        maps = [partial(self.datapath.write_map, name, wanted) for name, wanted in contents.items()]
        last = self._serve_devices, self._let_be_liberal
        do_all([*maps, partial(self.write_settings, covering), *last])
        self.flowtable.place(self._desired.served, contents["node_addresses"])
        self._written = inputs

    def differences(self, covering: Covering) -> Iterator[list[Drift]]:
        """Yield the differences between the maps and the last ``write``, map by map.

        Ends if something must be written again. Raises KernelError.
        """
        for name in list(self._contents()):
            if self.changed:
                return
            yield list(self._map_differences(name))
        if not self.changed:
            fields = self.datapath.settings_difference(self._settings(covering()))
            yield [Drift(events.Part.MAP, f"map settings: {name}", DIFFERS) for name in fields]
        if self.datapath.secret_differs():
            yield [Drift(events.Part.MAP, "map secret: #0", DIFFERS)]
        wrong = self.datapath.no_frontends.wrong()
        yield [Drift(events.Part.MAP, f"map no_frontends: #{at}", DIFFERS) for at in wrong]
        for wrong in self.datapath.places.wrong():
            yield [Drift(events.Part.MAP, f"map service_places: #{at}", DIFFERS) for at in wrong]

    def _map_differences(self, name: str) -> Iterator[Drift]:
        new, removed = self.datapath.map_difference(name, self._contents()[name])
        for key, _ in new:
            yield Drift(events.Part.MAP, f"map {name}: {key_text(key)}", DIFFERS)
        for key in removed:
            yield Drift(events.Part.MAP, f"map {name}: {key_text(key)}", NOT_PLANNED)

    def repair(self, covering: Mapping[Family, Prefix]) -> None:
        """Write everything again. Raises KernelError."""
        if self.datapath.secret_differs():
            self.datapath.restore_secret()
        self.datapath.no_frontends.repair()
        self.datapath.places.load()
        self.datapath.forget_maps()
        self.write(covering)

    def _contents(self) -> dict[str, dict[Any, Any]]:
        """Return map -> its wanted content."""
        addresses, primary = self.device_list.addresses, self.cluster.primary
        where = addresses, self.options.nodeport_addresses, primary
        self.health_check_addresses = devices.health_check_addresses(*where)
        serving = devices.served_addresses(*where)
        return {
            "node_addresses": dict.fromkeys(serving, 1),
            "own_addresses": dict.fromkeys(devices.own_addresses(addresses) | serving, 1),
            "link_addresses": self._desired.link_addresses(),
            "devices": self._desired.devices(),
            "timeouts": flow_timeouts(self.options.conntrack).table,
            **self._service_ranges(),
        }

    def services_written(self) -> None:
        """Note that every Service is written; write the ranges that have waited for that.

        Raises KernelError.
        """
        if not self._services_written:
            self._services_written = True
            for name, wanted in self._service_ranges().items():
                self.datapath.write_map(name, wanted)

    def write_settings(self, covering: Mapping[Family, Prefix]) -> None:
        """Write the settings, before the plan.

        ``covering`` are prefixes that hold every planned cluster IP.
        """
        self.datapath.write_settings(self._settings(covering))

    def _settings(self, covering: Mapping[Family, Prefix]) -> Settings:
        settings = self._desired.settings(self.options.map_settings, covering)
        sockets = _HOST_SOCKETS if self._follows_ipvs else NO_FLAGS
        return settings._replace(flags=settings.flags | self.engine.flags | sockets)

    def take_each_packet(self, rules: EachPacketRules) -> None:
        """Take the rules. New ones apply to open connections too, so offloads end.

        Raises KernelError if the chain "invalid" cannot be changed; ``write`` tries again.
        """
        former, self._each_packet = self._each_packet, rules
        if self.options.liberal_by_rules:
            self._let_be_liberal()
            if former is None or former.invalid != rules.invalid:
                why = rules.invalid and f"off: {rules.invalid}"
                log.info("--conntrack-tcp-be-liberal=auto: %s", why or "no rule is in the way")
            return
        off = why_off(self.options.fast_forward, rules)
        if former is None or former.lines != rules.lines:
            log.info("--fast-forward=auto: %s", off or "on")
        if former is None or former.changes != rules.changes:
            self.flowtable.end_flows()
        self.flowtable.allow(off)

    def _let_be_liberal(self) -> None:
        if self.options.liberal_by_rules and (rules := self._each_packet):
            self.engine.netfilter.let_be_liberal(wanted=not rules.invalid)

    @property
    def _liberal_state(self) -> str | None:
        """The state of --conntrack-tcp-be-liberal=auto; None if it is not wanted."""
        if not self.options.liberal_by_rules:
            return None
        rules, netfilter = self._each_packet, self.engine.netfilter
        if netfilter.is_liberal:
            return "on"
        if not rules:
            return "off: the rules are not read yet"
        obstacle = "it cannot be set: see the log" if netfilter.active else "netfilter is not used"
        return f"off: {rules.invalid or obstacle}"

    @property
    def _flowtable_state(self) -> str | None:
        """The state of --fast-forward in words; None if it is not wanted, or without any effect."""
        if self.engine.is_netfilter:
            return self.flowtable.said
        is_wanted = self.options.has_flowtable and self.engine.path is not None
        return "none: the flow tables serve" if is_wanted else None

    def programs_loaded(self) -> None:
        """Note new programs: ``attach`` must be called, and everything written."""
        self.attached, self._written = False, None

    def attach(self) -> None:
        """Put the loaded programs in force, if there are any. Raises KernelError."""
        if self.datapath.programs:
            self.datapath.wants_egress = self._wants_egress
            own, others = self._by_importance()
            now = {device.index for device in own}
            self._note_served(self.datapath.attach(self.options.cgroup, own + others, now))
        self.attached = True

    @property
    def uplinks(self) -> dict[Device, Addresses]:
        """The node's own devices that have programs now, with their addresses."""
        served = tuple(each for each in self._desired.served if each.index in self._served)
        return devices.uplinks(served, self.cluster.primary)

    @property
    def flows_wait(self) -> bool:
        """Whether packets open no flows, because not all devices have their first programs yet."""
        return self.attached and self.datapath.opens_no_flow

    @property
    def is_reached(self) -> bool:
        """Whether requests to the Node's addresses are served, if only by an earlier agent."""
        is_served = self.attached or bool(self._programmed)
        return is_served and self._own <= self._programmed and not self.flows_wait

    def status(self) -> Mapping[str, Any]:
        monitor = "active: the programs emit events" if self.datapath.others else None
        return {
            "devices_not_served": self.not_served,
            "devices_to_come": len(self.datapath.devices.to_come),
            "flows_wait": self.flows_wait,
            "packet_path": self.engine.path,
            "flowtable": self._flowtable_state,
            "conntrack_liberal": self._liberal_state,
            "attached": self.attached,
            "monitor": monitor,
            "socket_translation": self._socket_translation,
        }

    @property
    def _socket_translation(self) -> str:
        chosen = self.options.socket_translation
        waits = self._follows_ipvs and chosen != HOST_SOCKETS
        return f"{HOST_SOCKETS}, until {DEVICE} is gone" if waits else chosen

    def require_own_programs(self) -> None:
        """Raise NodeError if no programs of this agent are in force that could be exchanged."""
        if not self.attached or not self.datapath.programs:
            raise NodeError("the agent's programs are not loaded yet: see `ebpflb status`")

    def exchange(self, others: ProgramSet | None) -> None:
        """Put other programs in force, or the usual ones again. Raises NodeError, KernelError."""
        if others:
            self.require_own_programs()
        served = self._desired.served
        self._set_not_served(self.datapath.exchange(others, self.options.cgroup, served))

    def require_engine(self) -> None:
        """Decide the first engine. Raises KernelError if a demanded one cannot work now."""
        if self.engine.path is None:
            self._choose_engine()

    @property
    def due(self) -> float:
        """Once per sync period, since bridge settings change without an event.

        Also when a reason for another engine has lasted long enough.
        """
        return min(self._next_choice, self.engine.due)

    def turn(self) -> None:
        """Decide by the node's current state; ``changed`` becomes true if the engine changes."""
        self._next_choice = self._clock() + self.options.sync_period
        self.engine.forget_flows()
        if self.attached and (self._choose_engine() or self.datapath.has_needless_egress):
            self._written = None

    @property
    def _wants_egress(self) -> bool:
        """Whether programs are to be attached at egress, even while there are no flows."""
        return self.engine.needs_egress or bool(self.cluster.with_passive_health)

    def faults(self) -> Iterator[Iterable[Drift]]:
        """Yield, in steps, changed attachments and pins. Raises KernelError."""
        return self.datapath.faults(self.options.cgroup, self._desired.served)

    def restore(self) -> None:
        """Restore attachments and pins.

        Raises KernelError, and NodeError without a state directory.
        """
        self._has_new_devices = True  # this method does not know which devices lost their programs
        self._set_not_served(self.datapath.restore(self.options.cgroup, self._desired.served))

    def _serve_devices(self) -> None:
        if self.attached and self.datapath.programs:
            own, others = self._by_importance()
            self._note_served(self.datapath.attach_devices(own + others))

    def _by_importance(self) -> tuple[Devices, Devices]:
        return devices.by_importance(self._desired.served, self.cluster.primary)

    def take_attached(self) -> None:
        """Note the devices that have got programs in the background. Raises KernelError."""
        self._note_served(self.datapath.take_attached())

    def take_new_devices(self) -> bool:
        """Whether devices got programs since the last call.

        Packets may have passed these devices before.
        """
        found, self._has_new_devices = self._has_new_devices, False
        return found

    def _inputs(self) -> object:
        """Return everything that ``write`` depends on."""
        cluster = self.cluster
        known = cluster.service_cidrs, frozenset(cluster.listed)
        return self.device_list, cluster.node, self._wants_egress, *known

    def _service_ranges(self) -> dict[str, dict[Any, Any]]:
        """Return the service ranges; {} before they are known, so that the map stays unchanged.

        New ones wait until every Service is written: else a Service's address that another proxy
        has served so far would be an unused one for a moment, whose packets are dropped.
        """
        if Kind.SERVICE_CIDR not in self.cluster.listed:
            return {}
        ranges = self.cluster.service_cidrs
        if not self._services_written:
            ranges = ranges.intersection(self.datapath.service_ranges())
        return {"service_ranges": dict.fromkeys(map(service_range, ranges), 1)}

    def _desired_node(self) -> DesiredNode:
        known, primary = self.device_list.devices, self.cluster.primary
        detector, pod_cidrs = self.options.detector, self._pod_cidrs()
        return DesiredNode(known, self._served_devices(), primary, detector, pod_cidrs)

    def _served_devices(self) -> Devices:
        return devices.served(self.device_list.devices, self.options.devices, self._programmed)

    def _choose_engine(self) -> bool:
        pods = (*self.options.detector.cluster_cidrs, *self._pod_cidrs())
        flows_wait = self.attached and self.datapath.flows_wait
        return self.engine.update(self.device_list.devices, pods, flows_wait=flows_wait)

    def _pod_cidrs(self) -> tuple[Network, ...]:
        node = self.cluster.node
        return nodes.pod_cidrs(node) if node else ()

    def _note_served(self, failed: Mapping[str, str]) -> None:
        """Note which served devices have programs now: all except those failed or to come."""
        self._set_not_served(failed)
        served = {each.index for each in self._desired.served if each.name not in failed}
        served.difference_update(self.datapath.devices.to_come)
        self._has_new_devices |= not served <= self._served
        self._served = served
        self._programmed = frozenset(served)
        self._ports_may_go = self._served_devices() != self._desired.served

    def _set_not_served(self, failed: Mapping[str, str]) -> None:
        reasons = {**self._replies_lost(), **failed}
        log_new(self.not_served, reasons, _NOT_SERVED)
        self.not_served = reasons

    def _replies_lost(self) -> dict[str, str]:
        """Return the devices whose replies the flow tables cannot translate, with the reason."""
        if self.engine.path is None or self.engine.is_netfilter:
            return {}
        without = self.datapath.devices.attacher.without_egress
        return {each.name: _NO_EGRESS for each in self._desired.served if each.index in without}


# Load this agent's programs, and try again with growing pauses after a failure.
#
# A full disk, a short lack of memory or a killed compiler must not leave a node with old programs
# for good. Compiling takes seconds: from the second attempt on a thread does it, so that events are
# handled meanwhile, and the programs are then loaded from the cache.

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds; each pause is twice the previous one
POLL_SECONDS = 0.2  # while the thread compiles
_FAILURES = (CompileError, VerifierError, KernelError, NodeError)


class ProgramLoader(Part):
    """``on_loaded`` is called when programs were loaded that must be attached."""

    name = "programs"
    due = math.inf

    def __init__(
        self,
        datapath: Datapath,
        options: Options,
        on_loaded: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._programs = CURRENT_PROGRAMS  # or that old ones serve, and why
        self._on_loaded = on_loaded
        self._datapath, self._options, self._clock = datapath, options, clock
        self._pause = FIRST_PAUSE
        self._thread: threading.Thread | None = None
        self._first: Future[None] | None = None  # the attempt that ``start`` began

    def start(self) -> None:
        """Begin to load: the kernel verifies programs while the rest of the agent is made."""
        thread = ThreadPoolExecutor(1, "load")
        self._first = thread.submit(self._load)
        thread.shutdown(wait=False)

    def stop(self) -> None:
        """Wait until no thread loads programs any more."""
        if self._first:
            wait([self._first])

    def started(self) -> None:
        """Load the programs at the start, or wait for the attempt that ``start`` began.

        Raises CompileError, VerifierError, KernelError or NodeError if no old ones serve.
        """
        try:
            if self._first:
                self._first.result()
            else:
                self._load()
        except _FAILURES as error:
            if not self._datapath.is_attached():
                raise
            self._fail(error)

    def turn(self) -> None:
        """Try to load the programs again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile, name="compile", daemon=True)
            self._thread.start()
        if self._thread.is_alive():
            self.due = self._clock() + POLL_SECONDS
            return
        self._thread = None
        try:
            self._load()
        except _FAILURES as error:
            self._fail(error)
            return
        self._on_loaded()

    def status(self) -> Mapping[str, Any]:
        return {"programs": self._programs}

    def _compile(self) -> None:
        """Compile into the cache; a failure occurs in ``_load`` again, and is logged there."""
        try:
            self._datapath.compile(self._options.paths.cache)
        except _FAILURES as error:
            log.debug("compiling failed: %s", error)

    def _load(self) -> None:
        self.due = math.inf
        compiled = self._datapath.load(self._options.paths.cache)
        log.info("programs %s", "compiled" if compiled else "from the cache")
        self._programs, self._pause = CURRENT_PROGRAMS, FIRST_PAUSE

    def _fail(self, error: Exception) -> None:
        """Note a failure: an earlier agent's programs keep serving."""
        if not self._datapath.programs:
            self._programs = f"{FORMER_PROGRAMS}: {str(error).splitlines()[0]}"
        log.error("%s\nthe loaded programs keep serving; trying again in %g s", error, self._pause)
        self._later()

    def _later(self) -> None:
        self.due = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
