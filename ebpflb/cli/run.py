# SPDX-License-Identifier: Apache-2.0
"""``ebpflb run``: the agent in the foreground, until SIGTERM or SIGINT."""

import logging
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ebpflb import redaction
from ebpflb.agent import Inbox, Stop, build_agent
from ebpflb.cli import common, logs, run_options
from ebpflb.config.config_file import ConfigWatch
from ebpflb.config.fields import KubeProxyConfiguration
from ebpflb.config.translation import translate
from ebpflb.errors import ConfigurationError, EbpflbError, NodeError
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.netfilter import probe
from ebpflb.kernel.node import namespaces, sysctls
from ebpflb.model.nodes import FORWARD_OFF
from ebpflb.options import Options, Paths, flags_of
from ebpflb.serve import status
from ebpflb.stopping import parts
from ebpflb.tools import pins
from ebpflb.tools.node_checks import missing_requirements, required_results

log = logging.getLogger(__name__)

_NO_FLOWTABLE = "works with --packet-path=netfilter or auto only: the flow tables have no fast path"


@click.command(context_settings=run_options.GO_STYLE)
@run_options.ebpflb_options
@run_options.kube_proxy_options
@click.version_option(package_name="ebpflb", prog_name="ebpflb")
def run(**values: Any) -> None:
    """Run the agent, which serves Services on this node.

    It watches Services and EndpointSlices and writes them into the maps of the eBPF programs.

    Accepts kube-proxy's flags and its configuration file (configuration.md). Flags that are
    accepted but ignored are not listed here. SIGTERM stops the agent; the programs and maps stay in
    the kernel and keep serving until `ebpflb cleanup` removes them.

    \b
    $ ebpflb run --kubeconfig /etc/kubernetes/kubelet.conf
    $ ebpflb run --config /etc/ebpflb/kube-proxy.yaml --shadow
    $ ebpflb run --manifests /etc/ebpflb/manifests --hostname-override node-1
    """
    if values["manifests"] and values["kubeconfig"]:
        raise click.UsageError("--manifests and --kubeconfig cannot be combined")
    if values["cleanup"]:
        _clean_up(values)
        return
    logs.set_up(values["logging_format"])
    watch = ConfigWatch(Path(values["config"])) if values["config"] else None
    config = run_options.load(values)
    logs.set_format(config.logging.format)
    logs.set_verbosity(config.logging.verbosity)
    if values["write_config_to"]:
        run_options.write(config, Path(values["write_config_to"]))
        return
    with logs.last_error(config.logging.format):
        _start(config, values, watch)


def _start(
    config: KubeProxyConfiguration, values: dict[str, Any], watch: ConfigWatch | None
) -> None:
    run_options.warn_about_ignored(config, values)
    options = _with_removed_settings(_options(config, values))
    common.require_capabilities()
    if values["init_only"]:
        sysctls.set_up_conntrack(options.conntrack)
        probe.leave_answers(options.paths.answers_file)
        return
    require_features(values["state_dir"], values["cgroup_root"])
    with status.held(options.paths) as lock:
        serve_until_stopped(options, watch, run_options.effective_flags(options, values), lock)


def _clean_up(values: dict[str, Any]) -> None:
    common.require_capabilities()
    from ebpflb.cli.cleanup import remove_all  # its imports are not needed at a start

    run_dir = None if values["run_dir"] == Paths.run else values["run_dir"]
    remove_all(pins.paths(values["state_dir"], run_dir))


def _with_removed_settings(options: Options) -> Options:
    """Record the given settings that this version no longer has; log a warning for each."""
    removed = run_options.removed_settings(click.get_current_context())
    if options.fast_forward != FORWARD_OFF and not options.has_flowtable:
        removed["--fast-forward"] = _NO_FLOWTABLE
    for name, text in removed.items():
        log.warning("%s: %s", name, text)
    return replace(options, removed_settings=removed)


def _options(config: KubeProxyConfiguration, values: dict[str, Any]) -> Options:
    """Return the agent's options: the configuration's fields, and ebpflb's own options."""
    by_configuration = translate(config)
    if values["manifests"]:
        by_configuration["kubeconfig"] = None
    given = {
        name: values[flag.argument]
        for name, flag, _ in flags_of(Options)
        if values[flag.argument] is not None
    }
    fixed = {
        "paths": pins.paths(values["state_dir"], values["run_dir"], values["cache_dir"]),
        "node_name": run_options.node_name(config, socket.gethostname()),
        "cgroup": cgroup_links.cgroup_root(values["cgroup_root"]),
        "master": redaction.without_user(values["master"] or ""),
    }
    return Options(**{**by_configuration, **given, **fixed})


def serve_until_stopped(
    options: Options,
    watch: ConfigWatch | None,
    flags: Mapping[str, str],
    lock: status.AgentLock,
) -> None:
    namespaces.adjust_oom_score(options.oom_score_adj)
    namespaces.raise_file_limit()
    state, inbox = StateDir(options.paths.state, options.map_sizes), Inbox()
    parts.connect(inbox.put, lambda: inbox.put(Stop()), options.paths.failure_file)
    threading.excepthook = parts.thread_ended
    logs.act_on_signals()
    _stop_on_signals_and_changes(lambda: inbox.put(Stop()), watch)
    try:
        with build_agent(options, flags, lock, inbox) as agent:
            agent.run()
    except EbpflbError:
        if not any(state.links()):  # nothing is attached: the first start failed
            unpin_all(state)
        raise
    finally:
        if watch:
            watch.stop()
    if watch and watch.changed:
        raise ConfigurationError(
            f"{watch.path} has changed: exiting to be restarted with the new file"
        )
    if parts.ended_for:
        raise NodeError(f"part {parts.ended_for} keeps failing: exiting to be restarted")


def _stop_on_signals_and_changes(stop: Callable[[], None], watch: ConfigWatch | None) -> None:
    """Stop the agent on SIGTERM and SIGINT, and when the configuration file has changed.

    This is set up before any change of the host, so that a half-built agent's changes are undone
    too. Without a handler, the first process of a container would ignore SIGTERM.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
    if watch:
        watch.start(stop)


def require_features(state_dir: Path, cgroup_root: Path | None) -> None:
    """Raise NodeError with a line for each required feature that this node does not have."""
    lines = missing_requirements(required_results(state_dir, cgroup_root))
    if lines:
        raise NodeError("this node cannot run ebpflb:\n" + "\n".join(f"  {line}" for line in lines))
