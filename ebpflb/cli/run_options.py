# SPDX-License-Identifier: Apache-2.0
"""The options of ``ebpflb run``: kube-proxy's flags, and those that kube-proxy does not have."""

from collections.abc import Callable
from typing import Any, get_origin

import click
import msgspec

from ebpflb.cli import common
from ebpflb.config.config_file import decode
from ebpflb.config.fields import KubeProxyConfiguration, complete_listen_address, value_at
from ebpflb.config.parameters import PARAMETERS, SWITCHES, Parameter, type_of
from ebpflb.errors import in_json_words, plain
from ebpflb.model.addresses import Duration
from ebpflb.options import REMOVED_OPTIONS, Flag, Options, Paths, flags_of

# kube-proxy's flags as options of ``ebpflb run``, from ``ebpflb.config.parameters``.
#
# They are accepted in all ways that Go accepts: ``--flag=value``, ``--flag value``, a boolean as
# ``--flag`` or ``--flag=false``, underscores instead of dashes. Lists may use commas or repeat the
# flag. The value of a flag that is not on the command line is None.

GO_STYLE = {"token_normalize_func": lambda name: name.replace("_", "-")}
DEBUG_VERBOSITY = 4  # from this verbosity on, details are logged

_DEFAULT = complete_listen_address(KubeProxyConfiguration(), frozenset(), {})

_TYPES = {
    **dict.fromkeys(("cleanup", "init-only", *SWITCHES), bool),
    **dict.fromkeys(("healthz-port", "metrics-port"), int),
}
_FILE_FLAGS = {"config", "kubeconfig", "write-config-to"}

_Callback = Callable[[click.Context, click.Parameter, Any], Any]


def kube_proxy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds all flags of kube-proxy, except --version."""
    for parameter in reversed(PARAMETERS):
        if parameter.flags and parameter.flag != "version":
            command = _flag(parameter)(command)
    return command


def argument_name(parameter: Parameter) -> str:
    """The name of the function argument in which click passes the flag's value."""
    return parameter.flag.replace("-", "_")


def _flag(parameter: Parameter) -> Callable[[Any], Any]:
    kind = type_of(parameter) if parameter.fields else _TYPES.get(parameter.flag, str)
    without_value: dict[str, Any] = {}  # what the flag means if no value follows it
    if kind is bool or parameter.flag == "v":
        value = "true" if kind is bool else str(DEBUG_VERBOSITY)
        without_value = {"is_flag": False, "flag_value": value}
    names = parameter.flags.split()
    is_kubeconfig = parameter.flag == "kubeconfig"
    return click.option(
        argument_name(parameter),
        *(f"-{name}" for name in names if len(name) == 1),
        *(f"--{name}" for name in names),
        type=click.Path(exists=True, dir_okay=False) if is_kubeconfig else click.STRING,
        multiple=_is_collection(kind),
        metavar=_metavar(parameter, kind),
        callback=_converted_to(kind),
        help=parameter.help + _default_text(parameter),
        hidden=parameter.ignored,
        **without_value,
    )


def _metavar(parameter: Parameter, kind: Any) -> str:
    if parameter.flag in _FILE_FLAGS:
        return "FILE"
    names = {bool: "true|false", str: "TEXT", dict[str, bool]: "GATE=BOOL", Duration: "DURATION"}
    return names.get(kind, "LIST" if _is_collection(kind) else "NUMBER")


def _default_text(parameter: Parameter) -> str:
    """The default as kube-proxy's help shows it; nothing for "", booleans and collections."""
    if not parameter.fields:
        return ""
    value = value_at(_DEFAULT, parameter.fields.split()[0])
    shown = value and not isinstance(value, bool | tuple | dict)
    return f"  [default: {value}]" if shown else ""


def _is_collection(kind: Any) -> bool:
    return get_origin(kind) in (tuple, dict)


def _converted_to(kind: Any) -> _Callback:
    """A callback for click that converts the text to the type of the field."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        if value is None or value == ():
            return None
        try:
            return msgspec.convert(_split(kind, value), kind, strict=False, dec_hook=decode)
        except UnicodeError as error:
            raise click.BadParameter("is not UTF-8") from error
        except ValueError as error:  # msgspec's among them
            text = value if isinstance(value, str) else ",".join(value)
            reason = in_json_words(str(error).partition(" - at ")[0])
            raise click.BadParameter(plain(f'"{text}": {reason}')) from error

    return callback


def _split(kind: Any, value: Any) -> Any:
    """The texts of a collection -> its elements, as plain values."""
    if not _is_collection(kind):
        return value.removeprefix("=")  # click passes "=2" for -v=2
    parts = [part.strip() for text in value for part in text.split(",") if part.strip()]
    if kind == tuple[str, ...]:
        return parts
    pairs = [part.partition("=") for part in parts]
    return {key.strip(): text.strip().lower() for key, _, text in pairs}


def ebpflb_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds the options that kube-proxy does not have; None: not given."""
    for kind in (Paths, Options):
        for _, flag, default in reversed(list(flags_of(kind))):
            command = _own_option(flag, default)(command)
    for name in REMOVED_OPTIONS:
        command = click.option(name, hidden=True, expose_value=False, callback=_removed)(command)
    return command


def removed_settings(context: click.Context) -> dict[str, str]:
    """Return the removed settings on the command line -> what has become of them."""
    found: dict[str, str] = context.meta.setdefault("ebpflb.removed", {})
    return found


def _removed(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None:
        name = parameter.opts[0]
        removed_settings(context)[name] = REMOVED_OPTIONS[name]


def _own_option(flag: Flag, default: Any) -> Callable[[Any], Any]:
    if flag.is_directory:
        return common.directory(flag, default)
    is_switch = isinstance(default, bool)
    alone: dict[str, Any] = {}
    if flag.without_value:
        alone = {"is_flag": False, "flag_value": flag.without_value}
    shown = flag.default_text or format_value(flag.shown(default))
    return click.option(
        f"{flag.name}/--no-{flag.name[2:]}" if is_switch else flag.name,
        flag.argument,
        type=bool if is_switch else _Choice(flag) if flag.choices else str,
        default=None,
        multiple=flag.repeated,
        metavar=flag.metavar,
        callback=_parsed_by(flag),
        help=f"{flag.help}  [default: {shown}]" if shown else flag.help,
        **alone,
    )


class _Choice(click.Choice[str]):
    """Takes the former name of a choice too, with a warning; and one that was removed."""

    def __init__(self, flag: Flag) -> None:
        super().__init__(flag.choices)
        self._flag = flag

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if new := self._flag.former.get(value):
            click.echo(f"warning: {self._flag.name}={value} is now called {new}", err=True)
            value = str(new)
        if ctx and (instead := self._flag.removed.get(value)):
            text = f"was removed; {instead} is used instead"
            removed_settings(ctx)[f"{self._flag.name}={value}"] = text
            value = str(instead)
        return super().convert(value, param, ctx)


def _parsed_by(flag: Flag) -> _Callback:
    """A callback for click that parses what is given; a ValueError becomes a usage error."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        if value is None or value == ():
            return None
        try:
            return flag.parse(value) if flag.parse else value
        except ValueError as error:
            raise click.BadParameter(plain(str(error))) from error

    return callback


def format_value(value: Any) -> str:
    """As Go's pflag and component-base do: true, [a,b], A=true,B=false."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case dict():
            return ",".join(f"{name}={format_value(each)}" for name, each in sorted(value.items()))
        case tuple():
            return f"[{','.join(value)}]"
    return str(value)
