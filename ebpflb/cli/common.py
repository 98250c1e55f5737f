# SPDX-License-Identifier: Apache-2.0
"""Options and helpers that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ebpflb.errors import NodeError
from ebpflb.kernel.node import process
from ebpflb.options import Flag, Options, Paths, flags_of

Command = TypeVar("Command", bound=Callable[..., Any])
FLAGS = {name: flag for kind in (Paths, Options) for name, flag, _ in flags_of(kind)}


def directory(
    flag: Flag, default: Path | None = None, help: str = ""
) -> Callable[[Command], Command]:
    """An option that names a directory, on the command line or by the environment."""
    shown = f"  [default: {flag.default_text}]" if flag.default_text else ""
    return click.option(
        flag.name,
        type=click.Path(exists=flag.must_exist, file_okay=False, path_type=Path),
        envvar=flag.variable,
        show_envvar=True,
        default=default,
        show_default=default is not None,
        help=(help or flag.help) + shown,
    )


state_dir = directory(FLAGS["state"], Paths.state)
run_dir = directory(
    FLAGS["run"],
    help=f"The agent's --run-dir.  [default: as recorded in the state directory, or {Paths.run}]",
)
cgroup_root = directory(FLAGS["cgroup"])


def require_capabilities() -> None:
    """Raises NodeError that names the missing capabilities; the user need not be root."""
    missing = process.missing_capabilities()
    if missing:
        raise NodeError(f"missing capabilities: {', '.join(missing)}: run as root, or grant them")
