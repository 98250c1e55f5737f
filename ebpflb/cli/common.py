# SPDX-License-Identifier: Apache-2.0
"""Options and helpers that several commands share."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from ebpflb.errors import NodeError, plain
from ebpflb.kernel.node import namespaces
from ebpflb.options import Flag, Options, Paths, flags_of
from ebpflb.tools import pins

Command = TypeVar("Command", bound=Callable[..., Any])
_Parsed = TypeVar("_Parsed")
FLAGS = {name: flag for kind in (Paths, Options) for name, flag, _ in flags_of(kind)}


def directory(
    flag: Flag, default: Path | None = None, help: str = ""
) -> Callable[[Command], Command]:
    """Return an option for a directory, set on the command line or by an environment variable."""
    shown = f"  [default: {flag.default_text}]" if flag.default_text else ""
    return click.option(
        flag.name,
        type=click.Path(exists=flag.must_exist, file_okay=False, readable=False, path_type=Path),
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


def agents_paths(command: Callable[..., None]) -> Callable[..., None]:
    """Add --state-dir and --run-dir; the command gets ``paths``, and needs the capabilities."""

    @state_dir
    @run_dir
    @wraps(command)
    def with_paths(*, state_dir: Path, run_dir: Path | None, **others: Any) -> None:
        require_capabilities()
        command(paths=pins.paths(state_dir, run_dir), **others)

    return with_paths


def namespace(command: Command) -> Command:
    """Add ``-n``; "" means all namespaces, which is the default because these tools are about a
    node.
    """
    text = "Only Services of this namespace."
    return click.option("-n", "--namespace", default="", help=text)(command)


def is_in(namespace: str, service: str) -> bool:
    """Whether a Service (NAMESPACE/NAME...) is in this namespace; "" means all."""
    return not namespace or service.startswith(f"{namespace}/")


def parsed(parse: Callable[[Any], _Parsed]) -> Callable[[object, object, Any], _Parsed | None]:
    """Return a callback for click that parses a value; its ValueError becomes a usage error."""

    def callback(_context: object, _option: object, value: Any) -> _Parsed | None:
        if value in (None, ()):
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(plain(str(error))) from error

    return callback


def parse_service(text: str) -> tuple[str, str]:
    """Split NAMESPACE/NAME. Raises ValueError."""
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name or ":" in name:
        raise ValueError(f'"{text}" is not NAMESPACE/NAME such as default/web')
    return namespace, name


service = click.option(
    "--service",
    metavar="NAMESPACE/NAME",
    callback=parsed(parse_service),
    help="Only those of this Service.",
)


def require_capabilities() -> None:
    """Raise NodeError that names the missing capabilities. The user need not be root."""
    missing = namespaces.missing_capabilities()
    if missing:
        raise NodeError(f"missing capabilities: {', '.join(missing)}: run as root, or grant them")
