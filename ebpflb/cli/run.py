# SPDX-License-Identifier: Apache-2.0
"""``ebpflb run``: the agent in the foreground, until SIGTERM or SIGINT."""

import logging
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ebpflb.agent import Agent, build_agent
from ebpflb.cli import common, run_configuration, run_options
from ebpflb.cli.cleanup import remove_all
from ebpflb.configuration.fields import KubeProxyConfiguration
from ebpflb.configuration.translation import translate
from ebpflb.configuration.watch import ConfigWatch
from ebpflb.datapath.attach import cgroup_links
from ebpflb.datapath.attach.removal import unpin_all
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.diagnose.check import missing, required
from ebpflb.errors import ConfigurationError, EbpflbError, NodeError
from ebpflb.node import conntrack, process
from ebpflb.options import Options
from ebpflb.serve import status


@click.command(context_settings=run_options.GO_STYLE)
@run_options.ebpflb_options
@run_options.kube_proxy_flags
@click.version_option(package_name="ebpflb", prog_name="ebpflb")
def run(**values: Any) -> None:
    """Run the agent, which serves Services on this node.

    It watches Services and EndpointSlices and writes them into the maps of the eBPF programs.

    Accepts kube-proxy's flags and its configuration file (docs/configuration.md). Flags that are
    accepted but ignored are not listed here. SIGTERM stops the agent; the programs and maps stay in
    the kernel and keep serving until `ebpflb cleanup` removes them.
    """
    if values["manifests"] and values["kubeconfig"]:
        raise click.UsageError("--manifests and --kubeconfig cannot be combined")
    if values["cleanup"]:
        common.require_capabilities()
        remove_all(common.paths(values["state_dir"], values["run_dir"]))
        return
    _set_up_logging()
    watch = ConfigWatch(Path(values["config"])) if values["config"] else None
    config = run_configuration.load(values)
    if config.logging.verbosity >= run_options.DEBUG_VERBOSITY:
        logging.getLogger().setLevel(logging.DEBUG)
    if values["write_config_to"]:
        run_configuration.write(config, Path(values["write_config_to"]))
        return
    run_configuration.warn_about_ignored(config, values)
    common.require_capabilities()
    options = _options(config, values)
    if values["init_only"]:
        conntrack.set_up(options.conntrack)
        return
    _require_features(values["state_dir"], values["cgroup_root"])
    with status.lock(options.paths):
        _serve(options, watch, run_configuration.effective_flags(config, values))


def _options(config: KubeProxyConfiguration, values: dict[str, Any]) -> Options:
    """The configuration and ebpflb's own options, which are not part of it."""
    manifests: Path | None = values["manifests"]
    by_configuration = translate(config)
    if manifests:
        by_configuration["kubeconfig"] = None
    by_option = (
        "guard_nodeports",
        "devices",
        "packet_path",
        "socket_translation",
        "masquerade_local_backends",
        "masquerade_ports",
        "external_ips",
        "packet_mark",
        "nodeport_source_ranges",
    )
    return Options(
        paths=common.paths(values["state_dir"], values["run_dir"], values["cache_dir"]),
        node_name=run_configuration.node_name(config, socket.gethostname()),
        cgroup=values["cgroup_root"] or cgroup_links.cgroup_root(),
        manifests=manifests.absolute() if manifests else None,
        master=values["master"] or "",
        **by_configuration,
        **{name: values[name] for name in by_option},
    )


def _serve(options: Options, watch: ConfigWatch | None, flags: Mapping[str, str]) -> None:
    conntrack.set_up(options.conntrack)
    process.adjust_oom_score(options.oom_score_adj)
    process.raise_file_limit()
    state = StateDir(options.paths.state)
    try:
        with build_agent(options, flags) as agent:
            _stop_on_signals_and_changes(agent, watch)
            agent.run()
    except EbpflbError:
        if not any(state.links()):  # nothing is attached: the first start failed
            unpin_all(state)
        raise
    finally:
        if watch:
            watch.stop()
    if watch and watch.changed:
        raise ConfigurationError(f"{watch.path} has changed: exiting to be restarted with it")


def _stop_on_signals_and_changes(agent: Agent, watch: ConfigWatch | None) -> None:
    """Stops the agent on SIGTERM and SIGINT, and when the configuration file has changed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    if watch:
        watch.start(agent.stop)


def _require_features(state_dir: Path, cgroup_root: Path | None) -> None:
    """Raises NodeError with a line for each required feature that this node does not have."""
    lines = missing(required(state_dir, cgroup_root))
    if lines:
        raise NodeError("this node cannot run ebpflb:\n" + "\n".join(f"  {line}" for line in lines))


def _set_up_logging() -> None:
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
    )
    for verbose in ("urllib3", "kubernetes", "pyroute2"):
        logging.getLogger(verbose).setLevel(logging.WARNING)
