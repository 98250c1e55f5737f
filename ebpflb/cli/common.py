# SPDX-License-Identifier: Apache-2.0
"""Options and helpers that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ebpflb.errors import NodeError
from ebpflb.kernel.maps.state_dir import DEFAULT
from ebpflb.kernel.node import process
from ebpflb.options import Paths

Command = TypeVar("Command", bound=Callable[..., Any])
DIRECTORY = click.Path(file_okay=False, path_type=Path)

state_dir = click.option(
    "--state-dir",
    type=DIRECTORY,
    default=DEFAULT,
    show_default=True,
    help="Directory in a bpffs for pinned maps and links. Each node on a machine needs its own.",
)
agent_run_dir = click.option(
    "--run-dir",
    type=DIRECTORY,
    default=None,
    help=f"Directory of the agent's lock and status files.  [default: {Paths.run}]",
)
run_dir = click.option(
    "--run-dir",
    type=DIRECTORY,
    default=None,
    help=f"The agent's --run-dir.  [default: as recorded in the state directory, or {Paths.run}]",
)
cgroup_root = click.option(
    "--cgroup-root",
    type=DIRECTORY,
    default=None,
    help="Cgroup whose sockets are served, or a directory with a mount of cgroup v2 below it."
    "  [default: the root of cgroup v2]",
)


def require_capabilities() -> None:
    """Raises NodeError that names the missing capabilities; the user need not be root."""
    missing = process.missing_capabilities()
    if missing:
        raise NodeError(f"missing capabilities: {', '.join(missing)}: run as root, or grant them")
