# SPDX-License-Identifier: Apache-2.0
"""Options and helpers that several commands share."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from ebpflb.errors import EbpflbError, NodeError
from ebpflb.kernel.node import namespaces
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
        type=click.Path(exists=flag.must_exist, file_okay=False, readable=False, path_type=Path),
        envvar=flag.variable,
        show_envvar=True,
        default=default,
        show_default=default is not None,
        help=(help or flag.help) + shown,
    )


_STATE = FLAGS["state"].variable
_MOST_NAMES = 1000  # that complete a word

state_dir = directory(FLAGS["state"], Paths.state)
run_dir = directory(
    FLAGS["run"],
    help=f"The agent's --run-dir.  [default: as recorded in the state directory, or {Paths.run}]",
)
cgroup_root = directory(FLAGS["cgroup"])


def namespace(command: Command) -> Command:
    """``-n``, which is "" for all namespaces; these are a node's tools, so all is the default."""
    every = click.option(
        "-A",
        "--all-namespaces",
        is_flag=True,
        expose_value=False,
        help="Services of all namespaces: the default.",
    )
    one = click.option(
        "-n",
        "--namespace",
        default="",
        shell_complete=namespace_names,
        help="Only Services of this namespace.",
    )
    return every(one(command))


def is_in(namespace: str, service: str) -> bool:
    """Whether a Service is in this namespace, "" being all; ``service``: NAMESPACE/NAME..."""
    return not namespace or service.startswith(f"{namespace}/")


def _state(context: click.Context) -> Path:
    """The state directory that is named by the words so far, or by the environment."""
    named: Path | None = context.params.get("state_dir")
    return named or Path(os.environ.get(_STATE or "", Paths.state))


def service_names(context: click.Context, _option: object, incomplete: str) -> list[str]:
    """Complete the NAMESPACE/NAME of a Service in the maps."""
    return _names_in(
        context, incomplete, lambda maps: (str(it.owner) for _, it in maps["service_names"].items())
    )


def namespace_names(context: click.Context, _option: object, incomplete: str) -> list[str]:
    """Complete the name of a namespace that has a Service in the maps."""
    return _names_in(
        context, incomplete, lambda maps: (it.namespace for _, it in maps["service_names"].items())
    )


def pod_names(context: click.Context, _option: object, incomplete: str) -> list[str]:
    """Complete the name of a pod that is an endpoint of a Service."""
    return _names_in(
        context, incomplete, lambda maps: (it.target for _, it in maps["backend_names"].items())
    )


def _names_in(
    context: click.Context, begin: str, read: Callable[[dict[str, Any]], Iterable[str]]
) -> list[str]:
    """The names that are read of the maps and begin so; none without maps."""
    from ebpflb.tools import pins

    with suppress(EbpflbError, OSError), pins.pinned_maps(_state(context)) as maps:
        return sorted({name for name in read(maps) if name.startswith(begin)})[:_MOST_NAMES]
    return []


def _service(_context: object, _option: object, text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise click.BadParameter(f'"{text}" is not NAMESPACE/NAME such as default/web')
    return namespace, name


service = click.option(
    "--service",
    metavar="NAMESPACE/NAME",
    callback=_service,
    shell_complete=service_names,
    help="Only those of this Service.",
)


def moment(_context: object, _option: object, text: str | None) -> float | None:
    """Return a time as seconds since the epoch: a callback of click."""
    from ebpflb.history.records import parse_time

    try:
        return None if text is None else parse_time(text, time.time())
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def require_capabilities() -> None:
    """Raises NodeError that names the missing capabilities; the user need not be root."""
    missing = namespaces.missing_capabilities()
    if missing:
        raise NodeError(f"missing capabilities: {', '.join(missing)}: run as root, or grant them")
