# SPDX-License-Identifier: Apache-2.0
"""An agent with fake surroundings: the test sends the events, and the maps are dicts."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ebpflb.agent import Agent
from ebpflb.agent.audit import Audit, DoctorAudit, HooksCheck
from ebpflb.agent.canary_sync import CanarySync
from ebpflb.agent.engine import EngineChoice
from ebpflb.agent.loop import Inbox, Part, Stop
from ebpflb.agent.node_sync import NodeSync, ProgramLoader
from ebpflb.agent.reporter import (
    ApiServersFile,
    BesideKubeProxy,
    Publisher,
    Recorder,
    Reporter,
    SourceErrors,
    Stale,
)
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.agent.sync import Sync
from ebpflb.cluster import decoding
from ebpflb.entries.services import Settings
from ebpflb.errors import EbpflbError, KernelError, NodeError
from ebpflb.history.records import WriteCause
from ebpflb.kernel.map_writer import CAPACITY
from ebpflb.kernel.node import sysctls
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model import events
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.cluster_state import Applied, ClusterState, ObjectWarning
from ebpflb.model.devices import Devices
from ebpflb.model.endpoints import HealthCheck
from ebpflb.model.events import (
    Changed,
    Drift,
    Key,
    Kind,
    ObjectEvent,
    ReadObject,
    Replaced,
    SourceStatus,
)
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import PortName, Protocol
from ebpflb.options import REPORT, Options, Paths
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.planner import Plan
from ebpflb.plan.stale import Change, Removal
from ebpflb.serve import status
from ebpflb.serve.health import Health
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.status import AgentStatus
from ebpflb.stopping import parts
from tests.plan.simulation import Maps, writes

Json = dict[str, Any]
SYNCS = "kubeproxy_sync_{}proxy_rules_duration_seconds_count"  # the name of a metric


class FakeDatapath:
    """Records its calls; ``failures`` are raised by the next calls of ``apply``.

    ``full`` has the errors that ``write_map`` raises, by the name of the map.
    """

    def __init__(self) -> None:
        self.maps = Maps()
        self.capacity = CAPACITY
        self.plans: list[Plan] = []
        self.failures: list[EbpflbError] = []
        self.compiled = 0
        self.compile_error: EbpflbError | None = None
        self.others: None = None  # no monitor runs
        self.hooked = False
        self.attached: list[Path] = []
        self.programs: list[str] = []
        self.leftovers: MapContents | None = None
        self.small_maps: dict[str, dict[Any, Any]] = {}
        self.ranges: list[Network] = []
        self.settings = Settings()
        self.settings_at_plans: list[Settings] = []
        self.served: list[Devices] = []
        self.now: set[int] = set()  # the devices that did not wait for others
        self.devices = SimpleNamespace(
            to_come=set[int](),
            recorded=set[int](),
            attacher=SimpleNamespace(without_egress=set[int]()),
        )
        self.is_attaching = self.flows_wait = self.has_needless_egress = False
        self.wants_egress = True
        self.unattached: list[dict[str, str]] = []
        self.looked: list[Devices] = []
        self.taken_off: list[Drift] = []
        self.restored: list[Devices] = []
        self.full: dict[str, EbpflbError] = {}
        self.unreadable: list[EbpflbError] = []

    def load(self, cache: Path) -> bool:
        if self.compile_error:
            raise self.compile_error
        self.programs = ["connect4"]
        return False

    def compile(self, cache: Path) -> None:
        self.compiled += 1
        if self.compile_error:
            raise self.compile_error

    def is_attached(self) -> bool:
        return self.hooked

    def write_settings(self, settings: Settings) -> None:
        self.settings = settings

    def read_contents(self) -> MapContents:
        if self.unreadable:
            raise self.unreadable.pop()
        leftovers, self.leftovers = self.leftovers, None
        return leftovers or self.maps.read_back()

    def service_ranges(self) -> list[Network]:
        return self.ranges

    def write_map(self, name: str, wanted: dict[Any, Any]) -> None:
        if error := self.full.get(name):
            raise error
        self.small_maps[name] = dict(wanted)

    def apply(self, plan: Plan) -> None:
        """Write the plan; a failing call writes only the first half."""
        self.plans.append(plan)
        self.settings_at_plans.append(self.settings)
        rows = list(writes(plan))
        failure = self.failures.pop(0) if self.failures else None
        for part, row in rows[: len(rows) // 2] if failure else rows:
            self.maps.write(part, row)
        if failure:
            raise failure

    def attach(self, cgroup: Path, served: Devices, now: Collection[int]) -> dict[str, str]:
        self.attached.append(cgroup)
        self.now = set(now)
        return self.attach_devices(served)

    @property
    def opens_no_flow(self) -> bool:
        return self.flows_wait and "netfilter" not in self.settings.flags

    def take_attached(self) -> dict[str, str]:
        """Attach programs to the devices of ``to_come``."""
        self.devices.to_come.clear()
        self.is_attaching = self.flows_wait = False
        return {}

    def attach_devices(self, served: Devices) -> dict[str, str]:
        """Attach the programs; fail for the devices that the next entry of ``unattached`` names."""
        self.served.append(served)
        return self.unattached.pop(0) if self.unattached else {}

    def faults(self, cgroup: Path, served: Devices) -> Iterator[list[Drift]]:
        """Return the programs of ``taken_off``, until ``restore`` has put them back."""
        self.looked.append(served)
        yield list(self.taken_off)

    def restore(self, cgroup: Path, served: Devices) -> dict[str, str]:
        self.restored.append(served)
        self.taken_off.clear()
        if self.failures:
            raise self.failures.pop(0)
        return {}


class FakeNetfilter:
    """A table that can be made, unless there is an ``error``."""

    flags = frozenset({"netfilter"})

    def __init__(self) -> None:
        self.active = self.beside_flows = self.is_liberal = False
        self.starts = 0
        self.error: NodeError | None = None

    def start(self) -> None:
        if self.error:
            raise self.error
        self.starts += 1
        self.active = True

    def end(self) -> None:
        self.active = False

    def forget_flows(self) -> None:
        self.beside_flows = False

    def let_be_liberal(self, *, wanted: bool) -> None:
        if self.error:
            raise KernelError("writing the chain invalid", 0, str(self.error))
        self.is_liberal = wanted


def engine_choice(
    chosen: str,
    netfilter: FakeNetfilter | None = None,
    *,
    missing: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> EngineChoice:
    """Return an engine's choice for the agent's ``options``."""
    made: Any = netfilter or FakeNetfilter()
    chosen_options = {"sync_period": 0.0, "packet_path": chosen, **options}
    where = Paths(Path("/none")), "node-1", Path("/none")
    return EngineChoice(Options(*where, **chosen_options), made, missing=missing, clock=clock)


def reserve_ports(options: Options) -> str | None:
    """Reserve the ports, and leave conntrack alone."""
    return sysctls.reserve_ports(options.paths.ports_file, *options.masquerade_ports)


class FakeSource:
    """A source that emits nothing by itself."""

    def __init__(self) -> None:
        self.state = "made"
        self.times: dict[str, float] = {}

    def received(self) -> dict[str, float]:
        return dict(self.times)

    def start(self) -> None:
        self.state = "started"

    def stop(self) -> None:
        self.state = "stopped"


class FakeLock:
    """The lock of the state directory: ``lost`` until restored, unless another agent has it."""

    lost = others = False

    def faults(self) -> Iterator[Drift]:
        if self.lost:
            yield Drift(events.Part.PIN, "lock of /state", "is not held any more")

    def restore(self) -> bool:
        self.lost = self.lost and self.others
        return not self.others


class FakeHistory:
    """A history that keeps the causes, and writes nothing."""

    def __init__(self) -> None:
        self.causes: list[WriteCause] = []

    def event(self, event: ObjectEvent, applied: Applied) -> None:
        pass

    def because(self, cause: WriteCause) -> None:
        self.causes.append(cause)

    def reset(self, name: object, endpoint: str, count: str) -> None:
        pass

    def commit(self, before: object, now: object, *, keep: bool = False) -> None:
        pass


class FakeServiceHealth:
    """Health-check node ports that no client can reach."""

    def __init__(self) -> None:
        self.wanted: list[Mapping[Key, HealthCheck]] = []
        self.addresses: list[Mapping[Family, Collection[Address]]] = []

    def update(
        self, wanted: Mapping[Key, HealthCheck], addresses: Mapping[Family, Collection[Address]]
    ) -> None:
        self.wanted.append({**wanted})
        self.addresses.append(addresses)


class FakeStaleWorker:
    """A worker that records its calls."""

    def __init__(self) -> None:
        self.removals: list[Removal] = []
        self.resets: dict[PortName, Change] = {}
        self.checks_of_everything = self.checks_of_untranslated = 0
        self.error: str | None = None

    def check(self, removals: Iterable[Removal], changes: Mapping[PortName, Change]) -> None:
        self.removals += removals
        self.resets |= changes

    def check_untranslated(self) -> None:
        self.checks_of_untranslated += 1

    def check_everything(self) -> None:
        self.checks_of_everything += 1


def parts_of(made: Any, reporter: Reporter, stale: Any) -> list[Part]:
    """Return the parts of an agent without workers, as build.py lists them."""
    sync: Sync = made.sync
    return [
        *(made.loader, made.canary, sync, sync.service_sync, sync.node_sync, made.audit),
        *(reporter, Stale(stale, sync), Recorder(made.history, sync)),
        *(SourceErrors(dict), BesideKubeProxy("")),
        ApiServersFile(sync.options, sync.cluster, lambda urls: None),
    ]


class Harness:
    """The agent in a thread: the test sends it events, and watches its actions.

    It stands in for the agent's servers, and records what they would record.
    """

    def __init__(self, folder: Path) -> None:
        paths = Paths(folder / "state", folder, folder)
        self.engine = engine_choice(Engine.FLOWS)
        self.options = Options(paths, "node-1", folder / "cgroup", manifests=folder)
        self.datapath = FakeDatapath()
        self.health = Health(timeout=60)
        self.metrics = Metrics()
        self.service_health = FakeServiceHealth()
        self.stale = FakeStaleWorker()
        self.history = FakeHistory()
        self.more_parts: list[Part] = []
        self.events: list[str] = []
        self.annotations: list[ObjectWarning] = []  # events about them
        self.lacks: list[tuple[Key, str]] = []  # events about Services that do not fit
        self.clock: Callable[[], float] = time.monotonic
        self.now = 0.0  # of a test's own clock
        self.lock = FakeLock()
        self.sent = 0
        self.error: BaseException | None = None
        self.record_unknown_node: Callable[[str], None] = lambda note: None
        self.record_drift, self.record_annotation = self.events.append, self.annotations.append

    def start(self) -> None:
        datapath: Any = self.datapath
        cluster = ClusterState(
            self.options.node_name,
            bind_address=self.options.bind_address,
            admission=self.options.admission,
        )
        self.cluster, self.inbox = cluster, Inbox()
        self.node_sync = NodeSync(self.options, datapath, cluster, self.engine, clock=self.clock)
        self.service_sync = ServiceSync(
            datapath, cluster, self.node_sync, record_lack=self.record_lack
        )
        fakes: Any = self
        self.sync = Sync(self.node_sync, self.service_sync, self.clock, reserve_ports)
        reporter = Reporter(fakes, self.metrics, self.sync)
        checks = [HooksCheck(self.node_sync, fakes.lock, self._end)]
        self.audit = Audit(checks, reporter.drift_found, report_only=self.options.audit == REPORT)
        self.doctor_audit = DoctorAudit(self.options, self.inbox, cluster, self.audit)
        self.loader = ProgramLoader(datapath, self.options, self.sync.programs_loaded)
        self.canary = CanarySync(self.sync, self.clock)
        self.agent = Agent(
            self.inbox,
            [*parts_of(self, reporter, fakes.stale), self.doctor_audit, *self.more_parts],
            self.sync.take_turn,
            Publisher(self.options, self.health, self.audit, self.node_sync).publish,
            self.health.turned,
            self.clock,
        )
        record = self.options.paths.failure_file
        parts.connect(self.inbox.put, self._end, record)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def ports_not_open(self) -> dict[str, str]:
        return {}

    def record_lack(self, service: Key, reason: str) -> None:
        self.lacks.append((service, reason))

    def send(self, *events: object) -> None:
        """Send events; return when the agent has handled them as far as it could at once."""
        self.sent += 1
        for event in (*events, SourceStatus("sent", str(self.sent))):
            self.inbox.put(event)
        self.wait_for(lambda status: status.source_errors.get("sent") == str(self.sent))

    def wait_for(self, condition: Callable[[AgentStatus], object]) -> AgentStatus:
        """Return the agent's first status for which the condition is true."""
        wait_until("the agent publishes it", lambda: bool(condition(self.status)))
        return self.status

    @property
    def status(self) -> AgentStatus:
        return status.read(self.options.paths) or status.initial(node="", source="")

    def stop(self) -> None:
        self._end()
        self.thread.join(60)

    def _end(self) -> None:
        self.inbox.put(Stop())

    def _run(self) -> None:
        try:
            self.agent.run()
        except BaseException as error:
            self.error = error


def found(kind: Kind, manifest: Json) -> tuple[Key, ReadObject]:
    converted = decoding.convert(kind, manifest)
    return decoding.key_of(converted), ReadObject(converted, "test.yaml")


def listed(kind: Kind, *manifests: Json) -> Replaced:
    return Replaced(kind, dict(found(kind, each) for each in manifests))


def changed(kind: Kind, manifest: Json) -> Changed:
    return Changed(kind, *found(kind, manifest))


def service(name: str, ip: str, annotations: dict[str, str] | None = None) -> Json:
    ports = [{"port": 80, "protocol": "TCP"}]
    return manifests.service(name, [ip], ports, annotations=annotations)


def slices(name: str, *ips: str) -> Json:
    endpoints = [manifests.endpoint(ip, node="node-1", target=f"pod-{ip}") for ip in ips]
    return manifests.endpoint_slice(name, "IPv4", endpoints, [{"port": 8080, "protocol": "TCP"}])


def lists(found: Json, *ips: str) -> list[Replaced]:
    """Return all events of a cluster that has only this Service and its endpoints."""
    return [
        listed(Kind.SERVICE, found),
        listed(Kind.ENDPOINT_SLICE, slices(found["metadata"]["name"], *ips)),
        listed(Kind.NODE, manifests.node("node-1", "192.0.2.1")),
    ]


WEB = PortName("default", "web", "", Protocol.TCP, Family.IPV4)  # the port of ``service``


def used(harness: Harness) -> set[str]:
    """Return the endpoints in the cluster list of the only service port."""
    (entries,) = harness.service_sync.planner.actual.values()
    return {str(each.address) for each in entries.backends if "cluster" in each.flags}


def value(harness: Harness, name: str, **labels: str) -> float | None:
    """Return the value of one of the agent's metrics; None if it has no such sample."""
    return harness.metrics.registry.get_sample_value(name, labels)
