# SPDX-License-Identifier: Apache-2.0
"""One node's parts, put together: each is made here, and knows only what it is handed."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from ebpflb.agent.loop import Agent
from ebpflb.agent.reporter import Reporter
from ebpflb.cluster.list_watch import ApiSource
from ebpflb.cluster.manifest_source import ManifestSource
from ebpflb.cluster.recorder import ApiRecorder, LogRecorder, Recorder, server_factory
from ebpflb.cluster.source import Emit, Observe, Source
from ebpflb.configuration.fields import to_builtins
from ebpflb.configuration.translation import EXTERNAL_IPS
from ebpflb.datapath.datapath import Datapath
from ebpflb.datapath.maps.pins import StateDir
from ebpflb.datapath.maps.sweep import Sweeper
from ebpflb.node import ip_families, kube_proxy_watch
from ebpflb.node.namespaces import Namespaces
from ebpflb.options import ConntrackOptions, Options
from ebpflb.plan.expiry import Timeouts
from ebpflb.serve.metrics import Metrics
from ebpflb.serve.pages import Pages
from ebpflb.serve.servers import Servers
from ebpflb.stale_udp.worker import Cure


@contextmanager
def assembled(options: Options, flags: Mapping[str, str]) -> Iterator[Agent]:
    """An agent that is ready to run, and beside it at work what serves and heals.

    ``flags`` are those in force, for /flagz. At the end everything is stopped, in reverse. Raises
    NodeError for a port that must be had and cannot.
    """
    with ExitStack() as parts:
        gc.disable()  # until the agent has everything (loop.py)
        parts.callback(gc.enable)
        datapath = Datapath(StateDir(options.paths.state))
        parts.callback(datapath.close)
        metrics = Metrics()
        parts.callback(metrics.close)
        metrics.gate(EXTERNAL_IPS, "DEPRECATED", enabled=options.serve_external_ips)
        cure = Cure(datapath.maps, Namespaces().each, metrics.cured)
        servers = Servers(
            options,
            _recorder(options, metrics),
            _pages(options, flags, metrics),
            metrics.answered,
            families=ip_families.supported_families(),
        )
        reporter = Reporter(servers.health, metrics, servers.services)
        agent = Agent(options, datapath, _source(options, metrics.request), reporter, cure)
        metrics.read(datapath, lambda: agent.services.planner, agent.words)
        metrics.health(lambda: servers.health.healthy)
        sweeper = Sweeper(datapath.maps, _timeouts(options.conntrack))
        for part in (sweeper, cure, servers, kube_proxy_watch.KubeProxyWatch(agent.inbox.put)):
            parts.callback(part.stop)
            part.start()
        metrics.socket_destroy_supported(cure.supported)
        yield agent


def _source(options: Options, observe: Observe) -> Callable[[Emit], Source]:
    node, directory = options.node_name, options.manifests
    if directory is not None:
        return lambda emit: ManifestSource(emit, directory=directory, node_name=node)
    return lambda emit: ApiSource(
        emit,
        node_name=node,
        kubeconfig=options.kubeconfig,
        master=options.master,
        observe=observe,
    )


def _recorder(options: Options, metrics: Metrics) -> Recorder:
    if options.manifests:
        return LogRecorder()
    server = server_factory(options.kubeconfig, options.master, metrics.request)
    recorder = ApiRecorder(server, options.node_name)
    metrics.events_dropped(lambda: recorder.dropped)
    return recorder


def _pages(options: Options, flags: Mapping[str, str], metrics: Metrics) -> Pages:
    return Pages(
        metrics=metrics.exposition,
        slis=metrics.slis_exposition,
        configuration=lambda: to_builtins(options.configuration),
        flags=lambda: flags,
        on_ping=lambda: metrics.check("ping", "healthz", ok=True),
        profiling=options.profiling,
    )


def _timeouts(chosen: ConntrackOptions) -> Timeouts:
    return Timeouts(chosen.established, chosen.close_wait, chosen.udp, chosen.udp_stream)
