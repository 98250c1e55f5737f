# SPDX-License-Identifier: Apache-2.0
"""Builds every object of one node's agent."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from ebpflb.agent import memory
from ebpflb.agent.engine_choice import EngineChoice
from ebpflb.agent.loop import Agent, Inbox
from ebpflb.agent.node_sync import NodeSync, flow_timeouts
from ebpflb.agent.reporter import Reporter
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.cluster.list_watch import ApiSource
from ebpflb.cluster.manifest_source import ManifestSource
from ebpflb.cluster.recorder import ApiRecorder, LogRecorder, Recorder, server_factory
from ebpflb.cluster.source import Emit, Observe, Source
from ebpflb.configuration.fields import to_builtins
from ebpflb.configuration.translation import EXTERNAL_IPS
from ebpflb.datapath import conntrack_probe
from ebpflb.datapath.datapath import Datapath
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.datapath.maps.sweep import Sweeper
from ebpflb.datapath.programs import kfuncs
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.packet_path import Engine
from ebpflb.node import ip_families, kube_proxy_watch, nat
from ebpflb.node.device_watch import DeviceWatch
from ebpflb.node.namespaces import Namespaces
from ebpflb.node.nat_watch import NatWatch
from ebpflb.options import Options
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.metrics_pages import MetricsPages
from ebpflb.serve.servers import HttpServers
from ebpflb.stale_udp.worker import StaleUdpWorker


@contextmanager
def build_agent(options: Options, flags: Mapping[str, str]) -> Iterator[Agent]:
    """An agent that is ready to run. What works beside its loop, in other threads, is started.

    ``flags`` are those in force, for /flagz. At the end everything is stopped, in reverse order.
    Raises NodeError for a port that must be had and cannot, or an engine that was chosen and cannot
    work, and KernelError for unreadable maps.
    """
    with memory.startup(), ExitStack() as stack:
        datapath = Datapath(StateDir(options.paths.state))
        stack.callback(datapath.close)
        metrics = Metrics()
        stack.callback(metrics.close)
        inbox = Inbox()
        cluster = _cluster_state(options)
        servers = _servers(options, flags, metrics)
        engine = EngineChoice(options.packet_path, missing=_conntrack_obstacle(options))
        node_sync = NodeSync(options, datapath, cluster, engine)
        service_sync = ServiceSync(datapath, cluster, node_sync)
        stale_udp = StaleUdpWorker(datapath.maps, Namespaces().each, metrics.stale_flows_ended)
        agent = Agent(
            options=options,
            inbox=inbox,
            source=_source(options, inbox.put, metrics.request),
            device_watch=DeviceWatch(inbox.put),
            cluster=cluster,
            node_sync=node_sync,
            service_sync=service_sync,
            stale_udp=stale_udp,
            reporter=Reporter(servers.health, metrics, servers.service_health),
        )
        _read(metrics, agent, datapath, servers)
        sweeper = Sweeper(datapath.maps, flow_timeouts(options.conntrack))
        nat_watch = NatWatch(inbox.put, needed=lambda: engine.is_conntrack)
        metrics.conntrack(datapath.maps, lambda: nat_watch.restored)
        watches = (kube_proxy_watch.KubeProxyWatch(inbox.put), nat_watch)
        for thread in (sweeper, stale_udp, servers, *watches):
            stack.callback(thread.stop)
            thread.start()
        metrics.socket_destroy_supported(stale_udp.can_end)
        yield agent


def _read(metrics: Metrics, agent: Agent, datapath: Datapath, servers: HttpServers) -> None:
    """Lets the metrics read the others when they are asked for."""
    metrics.read(datapath, lambda: agent.service_sync.planner, lambda: agent.status)
    metrics.health(lambda: servers.health.healthy)
    metrics.gate(EXTERNAL_IPS, "DEPRECATED", enabled=agent.options.serve_external_ips)


def _conntrack_obstacle(options: Options) -> str | None:
    """Why the conntrack engine cannot work on this node; None where it works.

    If the flow tables were chosen, conntrack is not loaded into the kernel to find that out.
    """
    if options.packet_path == Engine.FLOWS and not kfuncs.are_loaded():
        return "conntrack is not loaded"
    return conntrack_probe.obstacle(options.paths.cache) or nat.missing()


def _cluster_state(options: Options) -> ClusterState:
    return ClusterState(
        options.node_name,
        bind_address=options.bind_address,
        admission=options.admission,
    )


def _source(options: Options, emit: Emit, observe: Observe) -> Source:
    if options.manifests is not None:
        return ManifestSource(emit, directory=options.manifests, node_name=options.node_name)
    return ApiSource(
        emit,
        node_name=options.node_name,
        kubeconfig=options.kubeconfig,
        master=options.master,
        observe=observe,
    )


def _servers(options: Options, flags: Mapping[str, str], metrics: Metrics) -> HttpServers:
    pages = MetricsPages(
        metrics=metrics.exposition,
        slis=metrics.slis_exposition,
        configuration=lambda: to_builtins(options.configuration),
        flags=lambda: flags,
        on_ping=lambda: metrics.check("ping", "healthz", ok=True),
        profiling=options.profiling,
    )
    recorder = _recorder(options, metrics)
    return HttpServers(
        options, recorder, pages, metrics.answered, families=ip_families.supported_families()
    )


def _recorder(options: Options, metrics: Metrics) -> Recorder:
    if options.manifests:
        return LogRecorder()
    server = server_factory(options.kubeconfig, options.master, metrics.request)
    recorder = ApiRecorder(server, options.node_name)
    metrics.events_dropped(lambda: recorder.dropped)
    return recorder
