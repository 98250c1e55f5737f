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
from ebpflb.cli import choices, common, configured, flags, flagz
from ebpflb.cli.cleanup import everything
from ebpflb.configuration.fields import KubeProxyConfiguration
from ebpflb.configuration.translation import translate
from ebpflb.configuration.watch import ConfigWatch
from ebpflb.datapath.attach import cgroup_links
from ebpflb.datapath.attach.removal import unpin_all
from ebpflb.datapath.maps.pins import StateDir
from ebpflb.diagnose.check import missing, required
from ebpflb.errors import ConfigurationError, EbpflbError, NodeError
from ebpflb.node import conntrack, process
from ebpflb.options import Options
from ebpflb.serve import status


@click.command(context_settings=flags.LIKE_GO)
@choices.own
@flags.every
@click.version_option(package_name="ebpflb", prog_name="ebpflb")
def run(**chosen: Any) -> None:
    """Serve: watch the cluster and keep the maps as it says.

    Takes kube-proxy's flags and its configuration file (docs/configuration.md); flags that have no
    effect here are not in this list. SIGTERM ends the agent and leaves everything in place,
    serving; `ebpflb cleanup` removes it.
    """
    if chosen["manifests"] and chosen["kubeconfig"]:
        raise click.UsageError("--manifests and --kubeconfig exclude each other")
    if chosen["cleanup"]:
        common.need_rights()
        everything(common.paths(chosen["state_dir"], chosen["run_dir"]))
        return
    _log()
    watch = ConfigWatch(Path(chosen["config"])) if chosen["config"] else None
    found = configured.configuration(chosen)
    if found.logging.verbosity >= flags.DETAILS:
        logging.getLogger().setLevel(logging.DEBUG)
    if chosen["write_config_to"]:
        configured.write(found, Path(chosen["write_config_to"]))
        return
    configured.remark(found, chosen)
    common.need_rights()
    options = _options(found, chosen)
    if chosen["init_only"]:
        conntrack.set_up(options.conntrack)
        return
    _refuse_if_missing(chosen["state_dir"], chosen["cgroup_root"])
    with status.lock(options.paths):
        _serve(options, watch, flagz.in_force(found, chosen))


def _options(found: KubeProxyConfiguration, chosen: dict[str, Any]) -> Options:
    manifests: Path | None = chosen["manifests"]
    own = ("guard_nodeports", "devices", "masquerade_local_backends", "masquerade_ports")
    by_kube_proxy = translate(found)
    if manifests:
        by_kube_proxy["kubeconfig"] = None
    return Options(
        paths=common.paths(chosen["state_dir"], chosen["run_dir"], chosen["cache_dir"]),
        node_name=configured.node_name(found, socket.gethostname()),
        cgroup=chosen["cgroup_root"] or cgroup_links.cgroup_root(),
        manifests=manifests.absolute() if manifests else None,
        master=chosen["master"] or "",
        **by_kube_proxy,
        **{name: chosen[name] for name in own},
    )


def _serve(options: Options, watch: ConfigWatch | None, in_force: Mapping[str, str]) -> None:
    conntrack.set_up(options.conntrack)
    process.adjust_oom_score(options.oom_score_adj)
    process.raise_file_limit()
    state = StateDir(options.paths.state)
    try:
        with build_agent(options, in_force) as agent:
            _stop_on_demand(agent, watch)
            agent.run()
    except EbpflbError:
        if not any(state.links()):  # a first start that failed leaves nothing
            unpin_all(state)
        raise
    finally:
        if watch:
            watch.stop()
    if watch and watch.changed:
        raise ConfigurationError(f"{watch.path} has changed: ending, to be started again with it")


def _stop_on_demand(agent: Agent, watch: ConfigWatch | None) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    if watch:
        watch.start(agent.stop)


def _refuse_if_missing(state_dir: Path, cgroup_root: Path | None) -> None:
    lines = missing(required(state_dir, cgroup_root))
    if lines:
        raise NodeError("this node cannot run it:\n" + "\n".join(f"  {line}" for line in lines))


def _log() -> None:
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
    )
    for chatty in ("urllib3", "kubernetes", "pyroute2"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
