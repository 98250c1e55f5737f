# SPDX-License-Identifier: Apache-2.0
"""``ebpflb run``: the agent in the foreground, until SIGTERM or SIGINT."""

import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ebpflb.agent import Agent
from ebpflb.cli import choices, options
from ebpflb.cli.choices import reading
from ebpflb.cluster.manifests import ManifestSource
from ebpflb.cluster.source import Emit, Source
from ebpflb.cluster.watching import ApiSource
from ebpflb.datapath import links
from ebpflb.datapath.datapath import Datapath
from ebpflb.datapath.state import State
from ebpflb.datapath.sweep import Sweeper
from ebpflb.diagnose.check import missing, required
from ebpflb.errors import EbpflbError, NodeError
from ebpflb.serve import status
from ebpflb.settings import Settings


@click.command()
@click.option(
    "--manifests",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Read Services, EndpointSlices and Nodes from the YAML files of this directory.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="How to reach the API server.  [default: as the pod we run in]",
)
@click.option("--node-name", help="The name of this Node.  [default: the host name]")
@click.option(
    "--nodeport-addresses",
    default="primary",
    show_default=True,
    callback=reading(choices.nodeport_addresses),
    help="Where NodePorts are served: 'primary', or CIDRs with commas between.",
)
@click.option(
    "--guard-nodeports/--no-guard-nodeports",
    default=True,
    show_default=True,
    help="Let bind() to a NodePort fail in the node's network namespace.",
)
@click.option(
    "--devices",
    metavar="PATTERN",
    multiple=True,
    callback=reading(choices.device_patterns),
    help="Serve packets at devices of this name ('eth*'), or not at those ('!cali*'); repeatable."
    "  [default: all but loopback]",
)
@choices.masquerading
@choices.detect_local
@click.option(
    "--cache-dir",
    type=options.DIRECTORY,
    default=Path("/var/cache/ebpflb"),
    show_default=True,
    help="Where compiled bytecode is kept.",
)
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
@options.cgroup_root
@options.state_dir
@options.run_dir
def run(
    manifests: Path | None,
    kubeconfig: Path | None,
    node_name: str | None,
    cache_dir: Path,
    verbose: bool,
    cgroup_root: Path | None,
    state_dir: Path,
    run_dir: Path,
    **chosen: Any,
) -> None:
    """Serve: watch the cluster and keep the maps as it says.

    SIGTERM ends the agent and leaves everything in place, serving; `ebpflb cleanup` removes it.
    """
    if manifests and kubeconfig:
        raise click.UsageError("--manifests and --kubeconfig exclude each other")
    detector = choices.detector(chosen)
    options.need_root()
    _log(verbose)
    _refuse_if_missing(state_dir, cgroup_root)
    settings = Settings(
        places=options.places(state_dir, run_dir, cache_dir),
        node_name=(node_name or socket.gethostname()).strip().lower(),
        cgroup=cgroup_root or links.cgroup_root(),
        manifests=manifests.absolute() if manifests else None,
        kubeconfig=kubeconfig,
        detector=detector,
        **chosen,
    )
    with status.lock(settings.places):
        _serve(settings)


def _serve(settings: Settings) -> None:
    state = State(settings.places.state)
    datapath = Datapath(state)
    agent = Agent(settings, datapath, _source(settings))
    sweeper = Sweeper(datapath.maps)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    try:
        sweeper.start()
        agent.run()
    except EbpflbError:
        if not any(state.links()):  # a first start that failed leaves nothing
            state.remove()
        raise
    finally:
        sweeper.stop()
        datapath.close()


def _source(settings: Settings) -> Callable[[Emit], Source]:
    node, kubeconfig = settings.node_name, settings.kubeconfig
    directory = settings.manifests
    if directory is not None:
        return lambda emit: ManifestSource(emit, directory=directory, node_name=node)
    return lambda emit: ApiSource(emit, node_name=node, kubeconfig=kubeconfig)


def _refuse_if_missing(state_dir: Path, cgroup_root: Path | None) -> None:
    lines = missing(required(state_dir, cgroup_root))
    if lines:
        raise NodeError("this node cannot run it:\n" + "\n".join(f"  {line}" for line in lines))


def _log(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
    )
    for chatty in ("urllib3", "kubernetes", "pyroute2"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
