# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, so that each is described once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.pins import DEFAULT, StateDir
from ebpflb.errors import NodeError
from ebpflb.node import capabilities
from ebpflb.options import Paths

Command = TypeVar("Command", bound=Callable[..., Any])
DIRECTORY = click.Path(file_okay=False, path_type=Path)

state_dir = click.option(
    "--state-dir",
    type=DIRECTORY,
    default=DEFAULT,
    show_default=True,
    help="Where maps and attachments are pinned; in a bpffs. One for each node on a machine.",
)
run_dir = click.option(
    "--run-dir",
    type=DIRECTORY,
    default=Paths.run,
    show_default=True,
    help="Where the agent's lock and its last words are.",
)
cgroup_root = click.option(
    "--cgroup-root",
    type=DIRECTORY,
    default=None,
    help="The cgroup whose sockets are served.  [default: the root of cgroup v2]",
)
output = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="How to print it.",
)


@contextmanager
def pinned_maps(state: Path) -> Iterator[dict[str, Map]]:
    """The maps as they serve. Raises NodeError where there are none."""
    maps = StateDir(state.absolute()).read_maps()
    try:
        yield maps
    finally:
        for opened in maps.values():
            opened.close()


def paths(state: Path, run: Path, cache: Path = Paths.cache) -> Paths:
    """Those of one node, made absolute."""
    return Paths(state=state.absolute(), run=run.absolute(), cache=cache.absolute())


def need_rights() -> None:
    """Raises NodeError that names the capabilities which are missing; root is not asked for."""
    missing = capabilities.missing()
    if missing:
        raise NodeError(f"this needs {' and '.join(missing)}: run it as root, or grant them")
