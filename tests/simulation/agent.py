# SPDX-License-Identifier: Apache-2.0
"""The real agent in simulated surroundings: kernel, clock, inbox and source.

``simulated`` replaces what leaves the process; nothing of the agent itself is replaced.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import Mock, patch

from ebpflb import files
from ebpflb.agent import canary_sync, engine, loop, missed_ends, node_sync
from ebpflb.agent.audit import Audit, ElementsCheck, HooksCheck, MapsCheck
from ebpflb.agent.canary_sync import CanarySync
from ebpflb.agent.engine import EngineChoice
from ebpflb.agent.loop import Agent
from ebpflb.agent.missed_ends import EndedConnections
from ebpflb.agent.node_sync import NodeSync, ProgramLoader
from ebpflb.agent.reporter import Publisher, Reporter
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.agent.sync import Sync
from ebpflb.entries.flows import Timeouts
from ebpflb.entries.services import service_name
from ebpflb.history.records import History
from ebpflb.kernel import bpf, datapath, map_writer, stale
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps import bpf_map, layout, state_dir, sweep
from ebpflb.kernel.maps.layout import MapSpec
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.maps.sweep import EndFlow
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.programs import compiler, loader
from ebpflb.model import addresses
from ebpflb.model.addresses import host_port
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.devices import LocalDetector, LocalMode
from ebpflb.model.events import Drift, PartStatus
from ebpflb.model.packet_path import Engine
from ebpflb.options import Options, Paths
from ebpflb.plan import canary, tables
from ebpflb.serve.health import Health
from ebpflb.serve.metrics import Metrics
from ebpflb.stopping import parts
from tests.agent.fakes import FakeServiceHealth, parts_of
from tests.simulation.doctor import CLIENT, ENDPOINT, LEASE, Doctor, in_families
from tests.simulation.kernel import CALLS, SimKernel
from tests.simulation.places import HOST_NETNS, NODE
from tests.simulation.tracked import TrackedFlows
from tests.simulation.translations import SimTable, Translated
from tests.simulation.workers import OpenSockets, Workers

T = TypeVar("T")

SYNC_PERIOD = 2.0  # seconds: hooks are compared as often, maps every fourth time
ENTRIES = {
    "services": 256,
    "service_places": 256,
    "slots": 384,
    "choices": 2048,  # of which a Service may have an eighth
    "service_stats": 96,
    "backend_slots": 256,
    "backend_names": 256,
    "source_ranges": 256,
    "tcp_flows": 128,
    "other_flows": 128,
    "affinity": 256,
    "new_affinity": 256,
    "no_frontends": layout.MAPS["no_frontends"].entries,  # programs compute its bits
}
SPECS: dict[str, MapSpec] = {
    name: spec._replace(entries=ENTRIES.get(name, min(spec.entries, 64)))
    for name, spec in layout.MAPS.items()
}
SECRET = 0x9E3779B97F4A7C15  # that of every node: schedules are replayed exactly
RUN = "run"  # the run directory
PRIMES = (7, 13, 31)  # the sizes of tables, which are written place by place
_EXIT = bytes.fromhex("b7000000010000009500000000000000")


def _compiled(source: str, flags: Any = (), **_: Any) -> compiler.Compiled:
    """Return programs that do nothing; connect4 shows to which maps the hooks refer."""
    loads = b"".join(
        struct.pack("<BBhiIi", 0x18, 1 << 4, 0, compiler.MAP_NUMBERS[name], 0, 0) for name in SPECS
    )
    sections = compiler.sections(source)
    programs = {name: loads + _EXIT if name == "connect4" else _EXIT for name in sections}
    return compiler.Compiled(programs, sections, cached=True)


class FastTimeouts(Timeouts):
    """Timeouts that are a tenth of the usual ones, in a table with only a few entries."""

    @cached_property
    def seconds(self) -> Any:
        usual = Timeouts(self.established, self.close_wait, self.udp, self.udp_stream).seconds
        return {
            protocol: {state: of_state / 10 for state, of_state in states.items()}
            for protocol, states in usual.items()
        }

    @cached_property
    def table(self) -> Any:
        usual = Timeouts(self.established, self.close_wait, self.udp, self.udp_stream).table
        return dict(list(usual.items())[:8])


TIMEOUTS = FastTimeouts()


def _one_by_one(calls: Iterable[Callable[[], T]], discard: Callable[[T], object]) -> list[T]:
    """Call the functions one by one, like ``side_by_side`` on one core."""
    made: list[T] = []
    try:
        made.extend(call() for call in calls)
    except Exception:
        for each in made:
            discard(each)
        raise
    return made


class _Thread:
    """A thread that runs its function at once."""

    def __init__(self, target: Callable[..., None], args: Any = (), **_: Any) -> None:
        self.start = partial(target, *args)
        self.join = lambda: None

    def is_alive(self) -> bool:
        return False


class _Lock:
    """A lock of the state directory that no one else has."""

    def faults(self) -> list[Drift]:
        return []

    def restore(self) -> bool:
        return True


@cache
def _remembered(name: str) -> Any:
    """Cache parsed addresses, which thousands of agents parse."""
    return cache(getattr(addresses, name))


def _of_kernel(sim: SimKernel) -> list[tuple[object, str, Any]]:
    return [
        *((bpf, name, getattr(sim, name)) for name in CALLS),
        (bpf_map, "ArrayMemory", sim.array_memory),
        (bpf_map, "possible_cpus", lambda: 1),
        (bpf_map, "counter_parts", lambda: 1),
        (state_dir, "mount_bpffs", lambda path: None),
    ]


@contextmanager
def simulated(
    sim: SimKernel, tracked: TrackedFlows, doctor: Doctor, table: SimTable
) -> Iterator[None]:
    """Replace everything that leads to the kernel and to other processes."""
    replaced: list[tuple[object, str, Any]] = [
        *_of_kernel(sim),
        (compiler, "compile_source", _compiled),
        (namespaces, "own_cookie", lambda: HOST_NETNS),
        (map_writer, "secrets", SimpleNamespace(randbits=lambda bits: SECRET)),
        (datapath, "socket_flags", lambda: ()),
        (datapath, "packet_flags", lambda **_: ()),
        (engine, "bridge_calls", dict),
        (engine, "SETTLE_SECONDS", 0.5),
        *table.patches(),
        (canary_sync, "LEASE_SECONDS", LEASE),
        (canary_sync, "secrets", SimpleNamespace(token_hex=doctor.token)),
        (canary, "CLIENTS", in_families(CLIENT.address)),
        (canary, "ENDPOINTS", in_families(ENDPOINT)),
        (missed_ends, "_PAUSE", 0),
        (loop, "time", SimpleNamespace(sleep=lambda seconds: None)),
        (node_sync, "flow_timeouts", lambda chosen: TIMEOUTS),
        (stale, "conntrack", tracked),
        (stale, "SockDiag", lambda: OpenSockets(None)),
        (files, "replace", lambda path, content: None),
        (node_sync, "threading", SimpleNamespace(Thread=_Thread)),
        (loader, "side_by_side", _one_by_one),
        (state_dir, "side_by_side", _one_by_one),
        (tables, "PRIMES", PRIMES),
        (tables, "PLACES", 2),
        *((addresses, name, _remembered(name)) for name in ("parse_network", "parse_address")),
    ]
    parts.connect(_fail, lambda: None, Path("/nowhere/record"))
    with ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(patch.object(module, name, value))
        yield


def _fail(status: PartStatus) -> None:
    """Let a bug end the schedule that found it."""
    assert not status.error, f"{status.part}: {status.error}"


def _options(state: Any, folder: Path) -> Options:
    return Options(
        Paths(state, folder / RUN, folder),
        NODE,
        folder,
        manifests=folder,
        packet_path=Engine.NETFILTER,
        sync_period=SYNC_PERIOD,
        detector=LocalDetector(LocalMode.NODE_CIDR),
    )


class _EndedConnections(EndedConnections):
    """The program that ends connections; its function comes from the library."""

    end: Callable[[bytes], None]

    def _end(self, key: bytes) -> None:
        self.end(key)


_LOCK: Any = _Lock()


class Life:
    """One agent, from its start to its end."""

    def __init__(
        self,
        state: Any,
        folder: Path,
        inbox: Any,
        metrics: Metrics,
        clock: Callable[[], float],
        specs: dict[str, MapSpec],
        workers: Callable[[Any], Workers],
        on_drift: Callable[[list[Drift]], None],
    ) -> None:
        """Build the agent as ``ebpflb.agent.build`` does. Raises KernelError."""
        self.options = _options(state, folder)
        self.clock = clock
        self.datapath = Datapath(StateDir(state), specs)
        cluster = ClusterState(NODE)
        self.netfilter = self.datapath.netfilter = Translated(self.datapath.maps, self.options)
        nodes = NodeSync(self.options, self.datapath, cluster, self._engine(), clock=clock)
        self.service_sync = ServiceSync(self.datapath, cluster, nodes, clock)
        self.health = Health(2 * SYNC_PERIOD, now=lambda: int(clock() * 1e9), monotonic=clock)
        self.ended = _EndedConnections(self.datapath.maps, folder)
        self.maps_check = MapsCheck(self.datapath, nodes, self.service_sync)
        self.workers = workers(self.datapath.maps)
        self.history = self._new_history()
        self.sync = Sync(nodes, self.service_sync, clock, lambda _: None)
        self.canary = CanarySync(self.sync, clock)
        self.loader = ProgramLoader(self.datapath, self.options, self.sync.programs_loaded, clock)
        self.audit = self._audit(nodes, self.history.explaining(on_drift))
        self.publisher = Publisher(self.options, self.health, self.audit, nodes)
        reporter = Reporter(self._servers(), metrics, self.sync, clock)
        self.agent = Agent(
            inbox,
            parts_of(self, reporter, self.workers.stale),
            self.sync.take_turn,
            self.publisher.publish,
            self.health.turned,
            clock,
        )

    def _new_history(self) -> History:
        self.options.paths.history_file.unlink(missing_ok=True)
        self.endpoints_at_start = self.endpoints()
        return History(self.options.paths, clock=self.clock)

    def endpoints(self) -> dict[str, set[str]]:
        """Return the written endpoints, by the service port's name in the history."""
        found: dict[str, set[str]] = {}
        for name, entries in self.service_sync.planner.actual.items():
            places = {host_port(*each.endpoint) for each in entries.backends}
            found.setdefault(service_name(name, 0), set()).update(places)
        return found

    def _servers(self) -> Any:
        """Return the servers, without ports; their events are ignored."""
        service_health = FakeServiceHealth()
        return Mock(health=self.health, service_health=service_health, ports_not_open=dict)

    def _engine(self) -> EngineChoice:
        return EngineChoice(self.options, self.netfilter, missing=None, clock=self.clock)

    def _audit(self, nodes: NodeSync, on_drift: Callable[[list[Drift]], None]) -> Audit:
        elements = ElementsCheck(self.netfilter, self.service_sync, self.maps_check.period)
        checks: list[Any] = [HooksCheck(nodes, _LOCK, lambda: None), self.maps_check, elements]
        return Audit(checks, on_drift, clock=self.clock)

    def sweep(self, end_flow: EndFlow, later: float = 0.0) -> None:
        """Sweep like the sweeper's thread, this many seconds later. Raises KernelError."""
        now = int((self.clock() + later) * 1e9)
        with patch.object(sweep, "time", SimpleNamespace(monotonic_ns=lambda: now)):
            for name in sweep.FLOW_MAPS:
                table = sweep.SweptTable(self.datapath.maps, name, TIMEOUTS, end_flow)
                list(table.sweep())
