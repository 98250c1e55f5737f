# SPDX-License-Identifier: Apache-2.0
"""Options and helpers that several commands share, and hints on wrong uses."""

import os
import re
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
    """Return an option that names a directory, on the command line or by the environment."""
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
_MOST_NAMES = 1000  # that complete a typed word

state_dir = directory(FLAGS["state"], Paths.state)
run_dir = directory(
    FLAGS["run"],
    help=f"The agent's --run-dir.  [default: as recorded in the state directory, or {Paths.run}]",
)
cgroup_root = directory(FLAGS["cgroup"])


def namespace(command: Command) -> Command:
    """Add ``-n``; "" means all namespaces, which is the default because these tools are about a
    node.
    """
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
    """Whether a Service (NAMESPACE/NAME...) is in this namespace; "" means all."""
    return not namespace or service.startswith(f"{namespace}/")


def _state(context: click.Context) -> Path:
    """Return the state directory from the typed words or the environment."""
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
    """Return the names in the maps that begin with the typed text; none without maps."""
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
    """Raise NodeError that names the missing capabilities. The user need not be root."""
    missing = namespaces.missing_capabilities()
    if missing:
        raise NodeError(f"missing capabilities: {', '.join(missing)}: run as root, or grant them")


# What was probably meant by a wrong use, in addition to click's suggestions.

# What kubectl's users type first.
VERBS = {"get": "services list", "list": "services list", "describe": "services get"}
SHOWS = {"services": "get", "flows": "list", "maps": "dump"}  # what a group has instead of them
# Commands of earlier versions.
REMOVED = {"audit": "`ebpflb doctor` answers what it answered; `status` does without an agent."}
# Commands and options that remove something: a mistyped word never leads to one of them.
REMOVING = {"cleanup", "flush", "--cleanup", "--kube-proxy", "--force", "--all", "--remove"}
_CHOICES = re.compile(r"is not one of .*")
_LONG = 200  # characters of an error, beyond which its list of words is left out
_ALIKE = 0.8  # from 0 to 1


def with_hint(error: click.UsageError) -> click.UsageError:
    """Return the error with a hint; the error itself if there is none."""
    possible: list[str] = getattr(error, "possibilities", None) or []
    possible[:] = [name for name in possible if name not in REMOVING]
    hint = _hint(error)
    if not hint:
        return error
    text = error.format_message().rstrip(".")
    if len(text) > _LONG:
        text = _CHOICES.sub("is not a known word", text)
    return click.UsageError(f"{text}. {hint}", error.ctx)


def _hint(error: click.UsageError) -> str:
    if isinstance(error, click.exceptions.NoSuchCommand):
        return _command(error)
    if isinstance(error, click.MissingParameter):
        is_service = error.param and "NAMESPACE/NAME" in (error.param.metavar or "")
        return "`ebpflb services list` shows the names." if is_service else ""
    if isinstance(error, click.BadParameter):
        return _choice(error)
    return _extra_argument(error)


def _extra_argument(error: click.UsageError) -> str:
    extra = re.search(r"unexpected extra argument \((.*)\)", error.message)
    options = {each.name for each in error.ctx.command.params} if error.ctx else set()
    if extra and "service" in options:
        return "Name a Service with --service NAMESPACE/NAME."
    is_service = extra and extra[1].count("/") == 1
    return f"`ebpflb services get {extra[1]}` shows a Service." if extra and is_service else ""


def _command(error: click.exceptions.NoSuchCommand) -> str:
    name = error.command_name
    if name in REMOVED:
        return REMOVED[name]
    if not error.ctx or error.possibilities:
        return ""
    if name in VERBS:
        group = error.ctx.command.name
        meant = f"{group} {SHOWS[group]}" if group in SHOWS else VERBS[name]
        return f"Did you mean `ebpflb {meant}`?"
    is_service = error.ctx.command.name == "services"
    return f"`ebpflb services get {name}` shows a Service." if is_service else ""


def _choice(error: click.BadParameter) -> str:
    """Suggest the choices that begin with the word, or resemble it."""
    given = re.match(r"'(.*)' is not one of ", error.message)
    if not (given and error.param and isinstance(error.param.type, click.Choice)):
        return ""
    from difflib import get_close_matches  # only errors need it

    names = [*map(str, error.param.type.choices)]
    close = [name for name in names if name.startswith(given[1])]
    close = close or get_close_matches(given[1], names, cutoff=_ALIKE)
    return f"Did you mean {' or '.join(close)}?" if close else ""
