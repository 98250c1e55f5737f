# SPDX-License-Identifier: Apache-2.0
"""What of an agent reaches beyond its process: the API, the kernel, files, ports."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from ebpflb import stopping
from ebpflb.agent import engine_choice
from ebpflb.agent.canary_requests import local_pages
from ebpflb.agent.engine_choice import EngineChoice
from ebpflb.agent.host_changes import HostChanges
from ebpflb.agent.inbox import Inbox
from ebpflb.agent.netfilter_sync import NetfilterSync
from ebpflb.cluster.api_source import ApiSource
from ebpflb.cluster.event_recorder import ApiRecorder, EventRecorder, LogRecorder, server_factory
from ebpflb.cluster.manifest_source import ManifestSource
from ebpflb.cluster.source import Emit, Source
from ebpflb.configuration.fields import to_builtins
from ebpflb.datapath.datapath import Datapath
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.history.recorder import History
from ebpflb.model.cluster_state import ClusterState
from ebpflb.node import ip_families
from ebpflb.node.flowtable_sync import FlowtableSync
from ebpflb.options import Options
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.metrics_pages import MetricsPages
from ebpflb.serve.servers import HttpServers


class Works(Protocol):
    """What works beside the loop."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


def start(stack: ExitStack, *they: Works) -> None:
    """Starts them in this order; the stack stops them."""
    for each in they:
        stack.callback(stopping.run_all, each.stop)
        each.start()


@dataclass(frozen=True)
class Parts:
    """What reaches beyond this process; ``host`` and later ones are opened once ``source`` can."""

    options: Options
    metrics: Metrics
    inbox: Inbox
    source: Source
    host: HostChanges
    datapath: Datapath
    history: History
    servers: HttpServers
    netfilter: NetfilterSync
    engine: EngineChoice
    flowtable: FlowtableSync


def open_parts(options: Options, flags: Mapping[str, str], stack: ExitStack, inbox: Inbox) -> Parts:
    """In this order; the stack closes them."""
    metrics = Metrics()
    stack.callback(metrics.close)
    source = make_source(options, inbox.put, metrics)
    source.prepare()
    host = stack.enter_context(HostChanges(options))
    with ThreadPoolExecutor(1, "probe") as beside:  # while the kernel allocates the maps
        probing = beside.submit(engine_choice.probe_netfilter, options)
        state = StateDir(options.paths.state, options.map_sizes)
        datapath = Datapath(state, fast_forward=options.fast_forward)
    stack.callback(datapath.close)
    missing, sctp = probing.result()
    datapath.netfilter = netfilter = NetfilterSync(datapath.maps, options, sctp=sctp)
    stack.callback(netfilter.close)
    history = History(options.paths, datapath.maps)
    start(stack, history)
    return Parts(
        options=options,
        metrics=metrics,
        inbox=inbox,
        source=source,
        host=host,
        datapath=datapath,
        history=history,
        servers=_servers(options, flags, metrics, inbox),
        netfilter=netfilter,
        engine=EngineChoice(
            options.packet_path,
            missing=missing,
            netfilter=netfilter,
            mark=options.packet_mark,
            patterns=options.devices,
            period=options.sync_period,
        ),
        flowtable=engine_choice.flowtable_of(options, missing),
    )


def cluster_state(options: Options) -> ClusterState:
    """The state of the cluster as these options see it, still empty."""
    bind_address, admission = options.bind_address, options.admission
    return ClusterState(options.node_name, bind_address=bind_address, admission=admission)


def make_source(options: Options, emit: Emit, metrics: Metrics) -> Source:
    """What emits the cluster's objects, not yet started."""
    if options.manifests is not None:
        return ManifestSource(emit, directory=options.manifests, node_name=options.node_name)
    return ApiSource(
        emit,
        node_name=options.node_name,
        kubeconfig=options.kubeconfig,
        master=options.master,
        observe=metrics.request,
        on_silent=metrics.watch_silent,
    )


def _servers(
    options: Options, flags: Mapping[str, str], metrics: Metrics, inbox: Inbox
) -> HttpServers:
    pages = MetricsPages(
        metrics=metrics.exposition,
        slis=metrics.slis_exposition,
        configuration=lambda: to_builtins(options.configuration),
        flags=lambda: flags,
        on_ping=lambda: metrics.check("ping", "healthz", ok=True),
        profiling=options.profiling,
    )
    families = ip_families.supported_families()
    about = options, _recorder(options, metrics), pages, metrics.answered
    local = local_pages(inbox.put)
    return HttpServers(*about, families=families, local=local, waiting=lambda: inbox.age)


def _recorder(options: Options, metrics: Metrics) -> EventRecorder:
    if options.manifests:
        return LogRecorder()
    server = server_factory(options.kubeconfig, options.master, metrics.request)
    recorder = ApiRecorder(server, options.node_name)
    metrics.events_dropped(lambda: recorder.dropped)
    return recorder
