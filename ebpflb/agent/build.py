# SPDX-License-Identifier: Apache-2.0
"""Create every object of one node's agent."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol

from ebpflb import stopping
from ebpflb.agent import engine, loop
from ebpflb.agent.address_owner import AddressOwner
from ebpflb.agent.address_writer import AddressWriter
from ebpflb.agent.audit import (
    ELEMENTS_NAME,
    TABLE_NAME,
    Audit,
    DoctorAudit,
    ElementsCheck,
    HooksCheck,
    MapsCheck,
    TableCheck,
)
from ebpflb.agent.canary_sync import CanarySync, UplinkCanary
from ebpflb.agent.endpoint_health import EndpointWatch
from ebpflb.agent.engine import EngineChoice, NetfilterSync
from ebpflb.agent.hand_over import HandOver
from ebpflb.agent.hand_over_test import HandOverTest
from ebpflb.agent.inspection import Inspection, answer, local_pages
from ebpflb.agent.loop import Agent, Inbox, Part, Stop
from ebpflb.agent.missed_ends import EndedConnections, UnreleasedSockets
from ebpflb.agent.monitoring import Monitoring
from ebpflb.agent.node_local import NodeLocalWatch, answering_in
from ebpflb.agent.node_readiness import NodeReadiness
from ebpflb.agent.node_sync import NodeSync, ProgramLoader, flow_timeouts
from ebpflb.agent.rebalance import Rebalancer
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
from ebpflb.agent.stale import StaleWorker
from ebpflb.agent.sync import DevicesAttached, Sync
from ebpflb.cluster.api_servers import ApiServers
from ebpflb.cluster.event_recorder import EventRecorder, server_factory
from ebpflb.cluster.source import ServerOptions, make_source
from ebpflb.config.fields import to_builtins
from ebpflb.config.translation import EXTERNAL_IPS
from ebpflb.history.records import History
from ebpflb.kernel.attach import uplink_program
from ebpflb.kernel.attach.uplink_program import Answerer
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.handing import Handing, believed
from ebpflb.kernel.maps.layout import ANSWERED, HANDED
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.maps.sweep import Sweeper
from ebpflb.kernel.netfilter.each_packet import EachPacketWatch
from ebpflb.kernel.netfilter.untracked import (
    DroppedWatch,
    UntrackedWatch,
    dropped_now,
    untracked_now,
)
from ebpflb.kernel.netfilter.watch import NatWatch
from ebpflb.kernel.node import kube_proxy, sysctls
from ebpflb.kernel.node.device_watch import DeviceWatch
from ebpflb.kernel.node.namespaces import Namespaces
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import FrameProgram
from ebpflb.kernel.quiet_sockets import QuietSockets
from ebpflb.model.annotations import HAND_OVER_KEEP_CLIENT
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Disturbed
from ebpflb.model.facts import Fact, Observed
from ebpflb.model.hand_over import Hops
from ebpflb.model.nodes import FORWARD_AUTO
from ebpflb.model.packet_path import Engine
from ebpflb.options import REPORT, Options
from ebpflb.serve.listener import Handler
from ebpflb.serve.metrics import Metrics, Sources
from ebpflb.serve.servers import HttpServers, MetricsPages
from ebpflb.serve.status import AgentLock


class Works(Protocol):
    """A worker beside the loop."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


@contextmanager
def build_agent(
    options: Options, flags: Mapping[str, str], lock: AgentLock, inbox: Inbox
) -> Iterator[Agent]:
    """Yield an agent that is ready to run, with its workers started in other threads.

    ``flags`` are the current values of all flags, for /flagz; ``lock`` is held. A ``Stop`` may be
    in the inbox. At the end everything is stopped, in reverse order. Raises ClusterError if the
    objects' source is configured so that it cannot work; nothing is changed before that is known.
    Raises NodeError for a required port that cannot be opened, or a wanted engine that cannot work,
    and KernelError for unreadable maps.
    """
    with loop.startup(), ExitStack() as stack:
        builder = _Builder(options, flags, lock, inbox, stack)
        yield builder.started_agent()


class _Builder:
    """Creates an agent's objects; those with effects outside this process come first.

    ``stack`` closes them.
    """

    def __init__(
        self,
        options: Options,
        flags: Mapping[str, str],
        lock: AgentLock,
        inbox: Inbox,
        stack: ExitStack,
    ) -> None:
        self._options, self._lock, self._inbox, self._stack = options, lock, inbox, stack
        self._metrics = Metrics()
        stack.callback(self._metrics.close)
        self._open_source()
        missing = self._open_datapath()
        self._history = History(options.paths)
        self._history.start()
        self._pages: dict[str, Handler] = {}  # of the local socket
        self._servers = self._make_servers(flags)
        self._engine = EngineChoice(options, self._netfilter, missing=missing)
        self._flowtable = engine.flowtable_of(options, missing)
        self._nat_watch = self._make_nat_watch()
        self._cluster = self._make_cluster()
        self._node_sync = NodeSync(
            options, self._datapath, self._cluster, self._engine, self._flowtable
        )
        self._service_sync = ServiceSync(
            self._datapath, self._cluster, self._node_sync, record_lack=self._servers.record_lack
        )
        self._sync = Sync(self._node_sync, self._service_sync)

    def _start(self, *workers: Works) -> None:
        """Start the workers in this order; the stack stops them."""
        for each in workers:
            self._stack.callback(stopping.run_all, each.stop)
            each.start()

    def _open_source(self) -> None:
        """Start the source of objects: its lists arrive while the agent is made."""
        options, inbox, admission = self._options, self._inbox, self._options.admission
        self._api_servers = ApiServers(
            options.api_servers,
            on_reached=lambda places: inbox.put(Observed(Fact.REACHED_SERVERS, places)),
        )
        server = ServerOptions(
            options.kubeconfig, options.master, self._api_servers, self._metrics.request
        )
        # Connects to the API server to write.
        self._writing_server = None if options.manifests else server_factory(server)
        self._source = make_source(
            inbox.put,
            # To share addresses, or to hand requests over, all Nodes are needed.
            node_name="" if admission.pools or admission.hands_over else options.node_name,
            manifests=options.manifests,
            server_options=server,
            on_silent=self._metrics.watch_silent,
        )
        self._source_errors = SourceErrors(self._source.received)
        self._source.prepare()
        self._start(self._source)

    def _open_datapath(self) -> str | None:
        """Open maps, programs and engine; return why netfilter cannot serve, or None."""
        options, inbox = self._options, self._inbox
        with ThreadPoolExecutor(1, "probe") as beside:  # while the kernel allocates the maps
            probing = beside.submit(engine.probe_netfilter, options)
            self._datapath = datapath = Datapath(
                StateDir(options.paths.state, options.map_sizes),
                on_attached=lambda: inbox.put(DevicesAttached()),
            )
            self._maps = datapath.maps
            # At the start; later NodeSync knows.
            datapath.wants_egress = options.shadow or options.packet_path == Engine.FLOWS
            self._stack.callback(datapath.close)
            self._loader = ProgramLoader(
                datapath, options, on_loaded=lambda: self._sync.programs_loaded()
            )
            self._start(self._loader)
        missing, sctp = probing.result()
        datapath.netfilter = self._netfilter = NetfilterSync(self._maps, options, sctp=sctp)
        self._stack.callback(self._netfilter.close)
        return missing

    def _make_servers(self, flags: Mapping[str, str]) -> HttpServers:
        options, metrics, inbox = self._options, self._metrics, self._inbox
        configuration = to_builtins(options.configuration)
        pages = MetricsPages(metrics, configuration, flags, options.profiling)
        families = sysctls.supported_families()
        return HttpServers(
            options,
            EventRecorder(self._writing_server, options.node_name),
            pages,
            metrics.answered,
            families=families,
            local=local_pages(self._pages),
            waiting=lambda: inbox.age,
        )

    def _make_nat_watch(self) -> NatWatch:
        """Return the watch of the table, which also starts the audit."""
        inbox, engine = self._inbox, self._engine

        def on_removed() -> None:
            """Start both audits: elements that a plan had just written are gone with the table."""
            inbox.put(Disturbed(TABLE_NAME))
            inbox.put(Disturbed(ELEMENTS_NAME))

        return NatWatch(
            inbox.put,
            self._netfilter,
            needed=lambda: (
                engine.is_netfilter or self._datapath.flows_wait if engine.path else None
            ),
            flowtable=self._flowtable,
            report_only=self._options.audit == REPORT,
            on_removed=on_removed,
        )

    def _frame_program(self, source: str) -> FrameProgram:
        program = FrameProgram(source, self._maps, self._options.paths.cache)
        self._stack.callback(program.close)
        return program

    def _make_cluster(self) -> ClusterState:
        options = self._options
        cluster = ClusterState(
            options.node_name, bind_address=options.bind_address, admission=options.admission
        )
        exempt = untracked_now([])  # what cannot be read is said by the watch
        cluster.observe(Fact.UNTRACKED_DESTINATIONS, exempt)
        return cluster

    def started_agent(self) -> Agent:
        """Return the agent, with its workers started and its metrics connected."""
        options, inbox, sync = self._options, self._inbox, self._sync
        reporter = Reporter(self._servers, self._metrics, sync)
        audit = self._audit(reporter)
        doctor = DoctorAudit(options, inbox, self._cluster, audit)
        canary = CanarySync(sync)
        uplinks = UplinkCanary(inbox, canary, self._node_sync)
        stale, health = self._stale_worker(), self._servers.health
        writers, watches = self._writers(), self._watches()
        parts = (
            self._loader,
            canary,
            sync,
            self._service_sync,
            self._node_sync,
            audit,
            doctor,
            reporter,
            Stale(stale, sync),
            uplinks,
            Recorder(self._history, sync),
            ApiServersFile(options, self._cluster, self._api_servers.name),
            self._source_errors,
            watches[-1],
            *writers,
            *self._hand_over(),
            BesideKubeProxy(options.left_to_kube_proxy),
        )
        self._pages |= {
            "/v1/pulse": lambda request: answer(health.pulse),
            "/v1/audit": lambda request: answer(doctor.report()),
            "/v1/canary/": uplinks.respond,
            "/v1/service": Inspection(inbox, sync, self._maps).respond,
        }
        self._start_workers(stale, uplinks, *watches)
        publisher = Publisher(options, health, audit, self._node_sync)
        self._connect_metrics(publisher, *watches)
        self._start(self._servers, *writers)
        return Agent(inbox, parts, sync.take_turn, publisher.publish, health.turned)

    def _start_workers(self, stale: StaleWorker, *others: Works) -> None:
        options, inbox, maps = self._options, self._inbox, self._maps
        end_flow = self._frame_program(precompile.FLOW_END).run
        self._start(
            Sweeper(maps, flow_timeouts(options.conntrack), end_flow),
            UnreleasedSockets(maps, options.paths.cache),
            stale,
            *others,
            EndedConnections(maps, options.paths.cache),
            UntrackedWatch(inbox.put, self._cluster.observed[Fact.UNTRACKED_DESTINATIONS]),
        )
        forwards_by_rules = options.has_flowtable and options.fast_forward == FORWARD_AUTO
        if forwards_by_rules or options.liberal_by_rules:
            self._start(EachPacketWatch(inbox.put, looks_at_ways=forwards_by_rules))
        self._start(
            kube_proxy.KubeProxyWatch(inbox.put),
            self._nat_watch,
            Monitoring(options.paths, self._datapath, self._node_sync, inbox.put),
            DeviceWatch(inbox.put),
        )
        self._metrics.socket_destroy_supported(stale.ends_udp)  # known since its start

    def _address_owner(self) -> AddressOwner:
        """Return the part that answers for load balancer addresses, if there is --l2-pool."""
        options, state = self._options, self._datapath.state
        if not options.l2_pools:
            uplink_program.ANSWER.remove(state)  # what an agent with the option has left
            state.unpin({ANSWERED.name: ANSWERED})
        make = partial(Answerer, state, options.paths.cache)
        return AddressOwner(self._cluster, self._node_sync, make, self._inbox)

    def _hand_over(self) -> tuple[Part, ...]:
        """Return the parts by which requests are handed to other nodes, if there is --hand-over."""
        options, cluster, inbox = self._options, self._cluster, self._inbox
        if not options.admission.hands_over:
            uplink_program.HAND_OVER.remove(self._datapath.state)  # what an agent with it has left
            self._datapath.state.unpin(HANDED)
            return ()
        drops = dropped_now([])  # what cannot be read is said by the watch
        cluster.observe(Fact.DROPPED_DESTINATIONS, drops)
        asked = options.hand_over == HAND_OVER_KEEP_CLIENT
        make = partial(Handing, self._datapath, options.paths.cache)
        part = HandOver(self._service_sync, self._hops, make, inbox)
        former = believed(self._datapath.state)
        self._hand_over_test = HandOverTest(
            cluster, self._node_sync, inbox, asked=asked, dropped=part.dropped, former=former
        )
        self._start(DroppedWatch(inbox.put, drops), self._hand_over_test)
        return self._hand_over_test, part

    def _hops(self) -> Hops | None:
        return self._hand_over_test.hops

    def _writers(self) -> tuple[NodeReadiness, AddressWriter, AddressOwner]:
        """Return the parts that tell others of this node, each in a thread of its own."""
        server, servers = self._writing_server, self._servers
        wrote, told = self._metrics.node_written, servers.record_no_address
        return (
            NodeReadiness(self._options, servers.health, server, wrote),
            AddressWriter(self._cluster, self._inbox, server, told),
            self._address_owner(),
        )

    def _audit(self, reporter: Reporter) -> Audit:
        inbox, service_sync = self._inbox, self._service_sync
        hooks = HooksCheck(self._node_sync, self._lock, lambda: inbox.put(Stop()))
        maps = MapsCheck(self._datapath, self._node_sync, service_sync)
        elements = ElementsCheck(self._netfilter, service_sync, maps.period)
        checks = hooks, TableCheck(self._nat_watch, hooks.period), maps, elements
        drift_found = self._history.explaining(reporter.drift_found)
        return Audit(checks, drift_found, report_only=self._options.audit == REPORT)

    def _stale_worker(self) -> StaleWorker:
        return StaleWorker(
            self._maps,
            Namespaces().each,
            self._frame_program(precompile.SOCKET_END).run,
            self._metrics.stale_flows_ended,
            self._metrics.connections_reset,
            shadow=self._options.shadow,
        )

    def _watches(self) -> tuple[EndpointWatch, NodeLocalWatch, Rebalancer]:
        """Return the threads that Services wake."""
        made = self._endpoint_watch(), self._node_local_watch(), self._rebalancer()
        self._cluster.watches = made
        return made

    def _endpoint_watch(self) -> EndpointWatch:
        record = self._servers.record_set_aside
        return EndpointWatch(self._maps, self._options, self._cluster, self._inbox, record)

    def _rebalancer(self) -> Rebalancer:
        return Rebalancer(
            QuietSockets(self._maps, self._options.paths.cache, Namespaces().each),
            self._cluster,
            self._inbox,
            actual=lambda: self._service_sync.planner.actual,
            source_errors=lambda: self._source_errors.errors,
        )

    def _node_local_watch(self) -> NodeLocalWatch:
        """Return the watch; an earlier agent's listeners keep serving until they are asked."""
        answering = answering_in(self._service_sync.planner.actual)
        self._cluster.observe(Fact.ANSWERING_LISTENERS, answering)
        return NodeLocalWatch(self._cluster, self._inbox)

    def _connect_metrics(
        self,
        publisher: Publisher,
        aside: EndpointWatch,
        node_local: NodeLocalWatch,
        rebalancer: Rebalancer,
    ) -> None:
        """Connect the metrics to the objects that they read on request."""
        options, labels = self._options, self._cluster.labels

        sources = Sources(
            self._datapath,
            planner=lambda: self._service_sync.planner,
            status=lambda: publisher.status,
            health=self._servers.health,
            counts=lambda: {
                "ebpflb_endpoints_set_aside": aside.count,
                "ebpflb_endpoint_set_aside_total": aside.times,
                "ebpflb_node_local_listeners": node_local.counts,
                "ebpflb_connections_moved_total": rebalancer.moved,
                "ebpflb_events_dropped_total": self._servers.events.dropped,
                "ebpflb_conntrack_table_restored_total": self._nat_watch.put_back,
            },
            series=options.service_metrics,
            labels_of=lambda key: labels.get(key, ""),
        )
        self._metrics.read(sources)
        self._metrics.gate(EXTERNAL_IPS, "DEPRECATED", enabled=options.serve_external_ips)
