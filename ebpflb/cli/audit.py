# SPDX-License-Identifier: Apache-2.0
"""``ebpflb audit``: compares this node once with what it should be, and changes nothing."""

import sys
from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import Output, list_option, print_list, show, watch_option
from ebpflb.model.drift import Drift
from ebpflb.options import Paths
from ebpflb.tools import kube_proxy, pins
from ebpflb.tools.comparison import compare


@click.command()
@common.state_dir
@common.run_dir
@common.cgroup_root
@watch_option
@list_option
def audit(
    state_dir: Path,
    run_dir: Path | None,
    cgroup_root: Path | None,
    watch: float | None,
    output: Output,
) -> None:
    """Compare this node with what it should be, once, and change nothing.

    Hooks, devices and pins; the entries of the maps, with each other and with a fresh list of the
    cluster's objects, from where the last agent has had them. An agent may run, or none. Exit
    status 0 if nothing differs; 1 if something does, cannot be compared, or if a kube-proxy runs
    in vain beside programs that no agent updates.

    \b
    $ ebpflb audit
    $ ebpflb audit --watch 10
    $ ebpflb audit -o json
    """
    common.require_capabilities()
    paths = pins.paths(state_dir, run_dir)
    drift, notes = show(
        lambda: _read(paths, cgroup_root), lambda found: _print(*found, output), watch
    )
    sys.exit(1 if drift or notes else 0)


def _read(paths: Paths, cgroup_root: Path | None) -> tuple[list[Drift], list[str]]:
    """What differs, and notes."""
    drift, not_listed = compare(paths, cgroup_root)
    notes = [f"not compared with the cluster: {not_listed}"] if not_listed else []
    if beside := kube_proxy.overruled(paths.state):
        notes.append(beside)
    return drift, notes


def _print(drift: list[Drift], notes: list[str], output: Output) -> None:
    rows = [{"part": each.part, "difference": str(each)} for each in drift]
    names = (each.part for each in drift)
    print_list(rows, output, names=names, notes=notes, what="differences")
