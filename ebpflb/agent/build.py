# SPDX-License-Identifier: Apache-2.0
"""Create every object of one node's agent."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ebpflb import stopping
from ebpflb.agent import engine_choice, loop
from ebpflb.agent.api_servers import ApiServersFile, ApiServerWatch
from ebpflb.agent.audit import (
    ELEMENTS_NAME,
    HOOKS_AND_PINS,
    TABLE_NAME,
    Audit,
    AuditCheck,
    ElementsCheck,
    HooksCheck,
    MapsCheck,
    TableCheck,
)
from ebpflb.agent.canary_sync import local_pages
from ebpflb.agent.endpoint_health import EndpointHealthSync
from ebpflb.agent.endpoint_watch import EndpointWatch
from ebpflb.agent.engine_choice import EngineChoice
from ebpflb.agent.loop import Agent, DevicesAttached, Inbox, Stop
from ebpflb.agent.missed_ends import EndedConnections, UnreleasedSockets
from ebpflb.agent.monitoring import Monitoring
from ebpflb.agent.netfilter_sync import NetfilterSync
from ebpflb.agent.node_local import NodeLocalSync, NodeLocalWatch, answering_in
from ebpflb.agent.node_readiness import NodeReadiness
from ebpflb.agent.node_sync import HostChanges, NodeSync, flow_timeouts
from ebpflb.agent.on_removal.reset_worker import ConnectionsReset, ResetWorker
from ebpflb.agent.on_removal.resets import ConntrackConnections, FlowConnections, SocketConnections
from ebpflb.agent.program_loader import ProgramLoader
from ebpflb.agent.reporter import Reporter
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.agent.stale_udp.worker import StaleUdpWorker
from ebpflb.cluster.api_servers import ApiServers
from ebpflb.cluster.event_recorder import (
    ApiRecorder,
    EventRecorder,
    WritingServer,
    server_factory,
)
from ebpflb.cluster.source import Source, make_source
from ebpflb.config.fields import to_builtins
from ebpflb.config.translation import EXTERNAL_IPS
from ebpflb.history.recorder import History
from ebpflb.kernel import probe
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.maps.sweep import EndFlow, Sweeper
from ebpflb.kernel.netfilter.flowtable import FlowtableSync
from ebpflb.kernel.netfilter.untracked import UntrackedWatch, untracked
from ebpflb.kernel.netfilter.watch import NatWatch
from ebpflb.kernel.node import kube_proxy_watch, sock_diag, sysctls
from ebpflb.kernel.node.device_watch import DeviceWatch, RemovalWatch
from ebpflb.kernel.node.namespaces import Namespaces
from ebpflb.kernel.programs import precompile
from ebpflb.kernel.programs.loader import FrameProgram
from ebpflb.model.api_servers import KeptApiServers, Silent
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Disturbed
from ebpflb.options import REPORT, Options
from ebpflb.plan.removed_endpoints import restore_watched
from ebpflb.serve import status
from ebpflb.serve.agent_lock import AgentLock
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.metrics_pages import MetricsPages
from ebpflb.serve.servers import HttpServers

# The parts of an agent that reach beyond its process: the API, the kernel, files, ports.


class Works(Protocol):
    """A worker beside the loop."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


def start(stack: ExitStack, *they: Works) -> None:
    """Start the workers in this order; the stack stops them."""
    for each in they:
        stack.callback(stopping.run_all, each.stop)
        each.start()


@dataclass(frozen=True)
class Parts:
    """The parts that reach beyond this process.

    All from ``host`` on are opened after ``source``.
    """

    options: Options
    metrics: Metrics
    inbox: Inbox
    api_servers: ApiServers
    source: Source
    host: HostChanges
    datapath: Datapath
    loader: ProgramLoader
    history: History
    servers: HttpServers
    netfilter: NetfilterSync
    engine: EngineChoice
    flowtable: FlowtableSync


def open_parts(options: Options, flags: Mapping[str, str], stack: ExitStack, inbox: Inbox) -> Parts:
    """Open the parts in order; the stack closes them."""
    metrics = Metrics()
    stack.callback(metrics.close)
    api_servers = ApiServers(options.api_servers, are_several=options.keeps_api_servers)
    source = _source(options, inbox, metrics, api_servers)
    source.prepare()
    host = stack.enter_context(HostChanges(options))
    with ThreadPoolExecutor(1, "probe") as beside:  # while the kernel allocates the maps
        probing = beside.submit(engine_choice.probe_netfilter, options)
        state = StateDir(options.paths.state, options.map_sizes)
        datapath = Datapath(
            state,
            fast_forward=options.fast_forward,
            on_attached=lambda: inbox.put(DevicesAttached()),
        )
        stack.callback(datapath.close)
        loader = ProgramLoader(datapath, options)
        start(stack, loader)
    missing, sctp = probing.result()
    datapath.netfilter = netfilter = NetfilterSync(datapath.maps, options, sctp=sctp)
    stack.callback(netfilter.close)
    history = History(options.paths, datapath.maps)
    start(stack, history)
    return Parts(
        options=options,
        metrics=metrics,
        inbox=inbox,
        api_servers=api_servers,
        source=source,
        host=host,
        datapath=datapath,
        loader=loader,
        history=history,
        servers=_servers(options, flags, metrics, inbox, api_servers),
        netfilter=netfilter,
        engine=_engine(options, missing, netfilter),
        flowtable=engine_choice.flowtable_of(options, missing),
    )


def _engine(options: Options, missing: str | None, netfilter: NetfilterSync) -> EngineChoice:
    return EngineChoice(
        options.packet_path,
        missing=missing,
        netfilter=netfilter,
        mark=options.packet_mark,
        patterns=options.devices,
        period=options.sync_period,
    )


def _source(options: Options, inbox: Inbox, metrics: Metrics, servers: ApiServers) -> Source:
    return make_source(
        inbox.put,
        node_name=options.node_name,
        manifests=options.manifests,
        kubeconfig=options.kubeconfig,
        master=options.master,
        servers=servers,
        observe=metrics.request,
        on_silent=metrics.watch_silent,
    )


def _servers(
    options: Options,
    flags: Mapping[str, str],
    metrics: Metrics,
    inbox: Inbox,
    api_servers: ApiServers,
) -> HttpServers:
    pages = MetricsPages(
        metrics=metrics.exposition,
        slis=metrics.slis_exposition,
        configuration=lambda: to_builtins(options.configuration),
        flags=lambda: flags,
        on_ping=lambda: metrics.check("ping", "healthz", ok=True),
        profiling=options.profiling,
    )
    families = sysctls.supported_families()
    recorder = _recorder(_server(options, metrics, api_servers), options, metrics)
    about = options, recorder, pages, metrics.answered
    local = local_pages(inbox.put)
    return HttpServers(*about, families=families, local=local, waiting=lambda: inbox.age)


def _server(
    options: Options, metrics: Metrics, servers: ApiServers
) -> Callable[[], WritingServer] | None:
    """Return what connects to the API server to write; None with manifests."""
    if options.manifests:
        return None
    return server_factory(options.kubeconfig, options.master, metrics.request, servers)


def _recorder(
    server: Callable[[], WritingServer] | None, options: Options, metrics: Metrics
) -> EventRecorder:
    if server is None:
        return EventRecorder()
    recorder = ApiRecorder(server, options.node_name)
    metrics.events_dropped(lambda: recorder.dropped)
    return recorder


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
        parts = open_parts(options, flags, stack, inbox)
        metrics, datapath = parts.metrics, parts.datapath
        nat_watch, removals = _removal_watches(parts)
        ends = _end_programs(parts, stack)
        agent = _agent(parts, nat_watch, lock, ends, _api_servers_file(parts, stack))
        _read(metrics, agent, datapath, parts.servers)
        metrics.conntrack(datapath.maps, lambda: nat_watch.put_back)
        if series := options.service_metrics:
            planner, labels = lambda: agent.service_sync.planner, agent.cluster.labels
            metrics.services(series, datapath.maps, planner, lambda key: labels.get(key, ""))
        sweeper = Sweeper(datapath.maps, flow_timeouts(options.conntrack), ends.flow.run)
        monitoring = Monitoring(options.paths, datapath, agent.node_sync, inbox.put)
        unreleased = UnreleasedSockets(datapath.maps, options.paths.cache)
        start(stack, sweeper, unreleased)
        start(stack, agent.stale_udp, agent.on_removal)
        start(stack, EndedConnections(datapath.maps, options.paths.cache))
        start(stack, agent.endpoint_health.watch)
        start(stack, agent.node_local.watch, UntrackedWatch(inbox.put, agent.cluster.untracked))
        start(stack, parts.servers)
        start(stack, agent.node_readiness)
        start(stack, kube_proxy_watch.KubeProxyWatch(inbox.put), nat_watch, removals, monitoring)
        metrics.socket_destroy_supported(agent.stale_udp.can_end)
        yield agent


class _EndPrograms(NamedTuple):
    """The programs that end what the maps hold of a flow, or of a socket (bpf/hooks)."""

    flow: FrameProgram
    socket: FrameProgram


def _end_programs(parts: Parts, stack: ExitStack) -> _EndPrograms:
    maps, cache = parts.datapath.maps, parts.options.paths.cache
    programs = _EndPrograms(
        FrameProgram(precompile.FLOW_END, maps, cache),
        FrameProgram(precompile.SOCKET_END, maps, cache),
    )
    for each in programs:
        stack.callback(each.close)
    return programs


def _agent(
    parts: Parts,
    nat_watch: NatWatch,
    lock: AgentLock,
    ends: _EndPrograms,
    api_servers_file: ApiServersFile,
) -> Agent:
    """Return the loop with everything that it calls."""
    options, metrics, inbox, datapath = parts.options, parts.metrics, parts.inbox, parts.datapath
    cluster, former = _cluster(options), status.read(options.paths)
    node_sync = NodeSync(options, datapath, cluster, parts.engine, parts.flowtable)
    record_lack = parts.servers.record_lack
    service_sync = ServiceSync(datapath, cluster, node_sync, record_lack=record_lack)
    reporter = _reporter(parts.servers, metrics)
    checks = _checks(parts, nat_watch, lock, node_sync, service_sync)
    drift_found = parts.history.explaining(reporter.drift_found)
    return Agent(
        options=options,
        inbox=inbox,
        source=parts.source,
        device_watch=DeviceWatch(inbox.put, route_sources=not probe.route_source()),
        cluster=cluster,
        node_sync=node_sync,
        service_sync=service_sync,
        endpoint_health=_endpoint_health(parts, cluster),
        node_local=_node_local(parts, cluster, service_sync),
        node_readiness=_node_readiness(parts),
        stale_udp=_stale_udp(parts, ends),
        on_removal=_reset_worker(parts, former, ends.flow.run),
        reporter=reporter,
        loader=parts.loader,
        audit=Audit(checks, drift_found, report_only=options.audit == REPORT),
        host=parts.host,
        history=parts.history,
        api_servers_file=api_servers_file,
    )


def _stale_udp(parts: Parts, ends: _EndPrograms) -> StaleUdpWorker:
    return StaleUdpWorker(
        parts.datapath.maps,
        Namespaces().each,
        ends.socket.run,
        parts.metrics.stale_flows_ended,
        shadow=parts.options.shadow,
    )


def _endpoint_health(parts: Parts, cluster: ClusterState) -> EndpointHealthSync:
    options, maps = parts.options, parts.datapath.maps
    watch = EndpointWatch(maps, options.paths.cache, options.cgroup, parts.inbox.put)
    said = parts.history.because, parts.servers.record_set_aside
    return EndpointHealthSync(cluster, watch, *said)


def _node_local(parts: Parts, cluster: ClusterState, service_sync: ServiceSync) -> NodeLocalSync:
    """Return the sync; listeners that an earlier agent has found serve until they are asked."""
    answering = answering_in(service_sync.planner.actual)
    cluster.set_answering(answering)
    return NodeLocalSync(cluster, NodeLocalWatch(parts.inbox.put, answering))


def _node_readiness(parts: Parts) -> NodeReadiness:
    options, metrics = parts.options, parts.metrics
    about = options.node_readiness, options.node_name, parts.servers.health
    server = _server(options, metrics, parts.api_servers)
    return NodeReadiness(*about, server, metrics.node_written)


def _checks(
    parts: Parts,
    nat_watch: NatWatch,
    lock: AgentLock,
    node_sync: NodeSync,
    service_sync: ServiceSync,
) -> tuple[AuditCheck, ...]:
    hooks = HooksCheck(node_sync, lock, lambda: parts.inbox.put(Stop()))
    maps = MapsCheck(parts.datapath, node_sync, service_sync)
    return (
        hooks,
        TableCheck(nat_watch, hooks.period),
        maps,
        ElementsCheck(parts.netfilter, service_sync, maps.period),
    )


def _cluster(options: Options) -> ClusterState:
    cluster = ClusterState(
        options.node_name,
        bind_address=options.bind_address,
        admission=options.admission,
        keeps_api_servers=options.keeps_api_servers,
    )
    cluster.set_untracked(untracked([]))  # what cannot be read is said by the watch
    return cluster


def _api_servers_file(parts: Parts, stack: ExitStack) -> ApiServersFile:
    """Return the file; its API servers are watched, and asked when the agent's own are gone."""
    watch = ApiServerWatch(lambda places: parts.inbox.put(Silent(places)))
    stack.callback(stopping.run_all, watch.stop)

    def on_change(found: KeptApiServers) -> None:
        parts.api_servers.name(found.urls)
        watch.set(found.endpoints)

    return ApiServersFile(parts.options.paths.api_servers_file, on_change)


def _reset_worker(
    parts: Parts, former: status.AgentStatus | None, end_flow: EndFlow
) -> ResetWorker:
    """Return the worker; with --shadow conntrack's connections belong to a kube-proxy."""
    maps = parts.datapath.maps
    sockets = SocketConnections(maps, Namespaces().each, sock_diag.can_destroy_tcp)
    own = (sockets, FlowConnections(maps, end_flow))
    kinds = own if parts.options.shadow else (*own, ConntrackConnections(maps))
    watched = restore_watched(former.reset_on_removal) if former else {}

    def on_reset(done: ConnectionsReset) -> None:
        parts.metrics.connections_reset(done.kind, done.number)
        parts.inbox.put(done)

    return ResetWorker(maps, kinds, watched, on_reset)


def _reporter(servers: HttpServers, metrics: Metrics) -> Reporter:
    return Reporter(
        *(servers.health, metrics, servers.service_health),
        record_unknown_node=servers.record_unknown_node,
        record_drift=servers.record_drift,
        record_annotation=servers.record_annotation,
        ports_not_open=servers.ports_not_open,
        record_limit=lambda warning: servers.record_lack(warning.key, warning.reason),
    )


def _removal_watches(parts: Parts) -> tuple[NatWatch, RemovalWatch]:
    """Return the watches that start the audit as soon as something is removed."""
    options, inbox, engine = parts.options, parts.inbox, parts.engine

    def on_removed() -> None:
        """Start both audits: elements that a plan had just written are gone with the table."""
        inbox.put(Disturbed(TABLE_NAME))
        inbox.put(Disturbed(ELEMENTS_NAME))

    nat_watch = NatWatch(
        inbox.put,
        parts.netfilter,
        needed=lambda: engine.is_netfilter if engine.path else None,
        flowtable=parts.flowtable,
        report_only=options.audit == REPORT,
        on_removed=on_removed,
    )
    folders = (*StateDir(options.paths.state, options.map_sizes).directories(), options.paths.state)
    return nat_watch, RemovalWatch(lambda: inbox.put(Disturbed(HOOKS_AND_PINS)), folders)


def _read(metrics: Metrics, agent: Agent, datapath: Datapath, servers: HttpServers) -> None:
    """Connect the metrics to the objects that they read on request."""
    metrics.read(datapath, lambda: agent.service_sync.planner, lambda: agent.status)
    metrics.health(lambda: servers.health.healthy)
    metrics.ready(lambda: servers.health.ready)
    metrics.waiting(lambda: servers.health.pulse.waiting)
    metrics.api_servers_silent(lambda: len(agent.cluster.silent))
    metrics.node_local(lambda: agent.node_local.watch.counts)
    metrics.set_aside(lambda: agent.endpoint_health.count, lambda: agent.endpoint_health.times)
    metrics.gate(EXTERNAL_IPS, "DEPRECATED", enabled=agent.options.serve_external_ips)
