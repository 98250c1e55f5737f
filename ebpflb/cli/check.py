# SPDX-License-Identifier: Apache-2.0
"""``ebpflb check``: whether this node can run ebpflb, feature by feature."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ebpflb.cli import common
from ebpflb.cli.output import Output, list_option, print_results
from ebpflb.options import Paths
from ebpflb.serve import status
from ebpflb.tools import pins
from ebpflb.tools.check import check_node
from ebpflb.tools.node_checks import WARNING, WRONG, CheckResult, judged


@click.command()
@common.cgroup_root
@common.state_dir
@common.run_dir
@list_option
def check(cgroup_root: Path | None, state_dir: Path, run_dir: Path, output: Output) -> None:
    """Check whether this node can run ebpflb.

    Tries every feature that ebpflb uses. For each one that is missing, prints what to do about it
    or what does not work without it. The last line is the verdict. Exit status 0 if nothing
    required is missing.

    \b
    $ ebpflb check
    $ ebpflb check -o wide
    $ ebpflb check -o json
    """
    paths = pins.paths(state_dir, run_dir)
    results = [*check_node(paths, cgroup_root), *_of_agent(paths)]
    print_results(results, output, "MISSING")
    lacking = [result.feature for result in results if result.result == WRONG]
    if output.has_sentences:
        lacks = f"cannot run ebpflb: it lacks {', '.join(lacking)}"
        click.echo(f"\nThis node {lacks if lacking else 'can run ebpflb'}.")
    sys.exit(1 if lacking else 0)


def _of_agent(paths: Paths) -> Iterator[CheckResult]:
    """Yield results that only a running agent knows: settings, and whether its Node exists."""
    published = status.read(paths)
    if not published or not published.lists_complete or not status.is_running(paths):
        return
    for name, text in published.removed_settings.items():
        yield CheckResult(f"setting {name}", WARNING, "has no effect", text)
    if state := published.flowtable:
        is_there = not state.startswith("none")
        yield judged("flowtable", is_there, state, "--fast-forward has no effect")
    unknown = published.node_unknown
    lost = "/healthz answers 503, no endpoint counts as local; set --hostname-override"
    yield judged("this node's Node", not unknown, unknown or published.node, lost)
