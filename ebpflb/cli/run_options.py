# SPDX-License-Identifier: Apache-2.0
"""The options of ``ebpflb run``: kube-proxy's flags, and ebpflb's own."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast, get_origin

import click
import msgspec

from ebpflb.cli import common, logs
from ebpflb.config import config_file, fields, parameters, translation, validation
from ebpflb.config.config_file import decode
from ebpflb.config.fields import (
    KubeProxyConfiguration,
    complete_listen_address,
    replace_at,
    value_at,
)
from ebpflb.config.parameters import EFFECTIVE_WITH_CONFIG, PARAMETERS, SWITCHES, Parameter, type_of
from ebpflb.config.validation import FieldError
from ebpflb.errors import ConfigurationError, in_json_words, instead_of_os_error
from ebpflb.model.addresses import Duration
from ebpflb.options import REMOVED_OPTIONS, Flag, Options, Paths, flags_of
from ebpflb.redaction import redact

# kube-proxy's flags as options of ``ebpflb run``, from ``ebpflb.config.parameters``.
#
# They are accepted in all ways that Go accepts: ``--flag=value``, ``--flag value``, a boolean as
# ``--flag`` or ``--flag=false``, underscores instead of dashes. Lists may use commas or repeat the
# flag. The value of a flag that is not on the command line is None.

LIBERAL = "conntrack-tcp-be-liberal"

GO_STYLE = {"token_normalize_func": lambda name: name.replace("_", "-")}

_DEFAULT = complete_listen_address(KubeProxyConfiguration(), frozenset(), {})

_TYPES = {
    **dict.fromkeys(("cleanup", "init-only", *SWITCHES), bool),
    **dict.fromkeys(("healthz-port", "metrics-port"), int),
    LIBERAL: fields.Liberal,
}
_FILE_FLAGS = {"config", "kubeconfig", "write-config-to"}


def kube_proxy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all flags of kube-proxy, except --version, to the decorated command."""
    for parameter in reversed(PARAMETERS):
        if parameter.flags and parameter.flag != "version":
            command = _flag(parameter)(command)
    return command


def argument_name(parameter: Parameter) -> str:
    """Return the name of the function argument in which click passes the flag's value."""
    return parameter.flag.replace("-", "_")


def _flag(parameter: Parameter) -> Callable[[Any], Any]:
    kind = _TYPES.get(parameter.flag, type_of(parameter) if parameter.fields else str)
    without_value: dict[str, Any] = {}  # what the flag means if no value follows it
    if kind is bool or parameter.flag in ("v", LIBERAL):
        value = str(logs.DEBUG_VERBOSITY) if parameter.flag == "v" else "true"
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
        callback=common.parsed(_converted_to(kind)),
        help=parameter.help + _default_text(parameter),
        hidden=parameter.ignored,
        **without_value,
    )


def _metavar(parameter: Parameter, kind: Any) -> str:
    if parameter.flag in _FILE_FLAGS:
        return "FILE"
    if parameter.flag == LIBERAL:
        return "true|false|auto"
    names = {bool: "true|false", str: "TEXT", dict[str, bool]: "GATE=BOOL", Duration: "DURATION"}
    return names.get(kind, "LIST" if _is_collection(kind) else "NUMBER")


def _default_text(parameter: Parameter) -> str:
    """Return the default as kube-proxy's help shows it; "" for booleans, collections and no
    value.
    """
    if not parameter.fields:
        return ""
    value = value_at(_DEFAULT, parameter.fields.split()[0])
    shown = value and not isinstance(value, bool | tuple | dict)
    return f"  [default: {value}]" if shown else ""


def _is_collection(kind: Any) -> bool:
    return get_origin(kind) in (tuple, dict)


def _converted_to(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts the flag's text to the type of the field."""

    def convert(value: Any) -> Any:
        try:
            return msgspec.convert(_split(kind, value), kind, strict=False, dec_hook=decode)
        except UnicodeError:
            raise ValueError("is not UTF-8") from None
        except ValueError as error:  # msgspec's among them
            text = value if isinstance(value, str) else ",".join(value)
            reason = in_json_words(str(error).partition(" - at ")[0])
            raise ValueError(f'"{text}": {reason}') from error

    return convert


def _split(kind: Any, value: Any) -> Any:
    """Split the texts of a collection into its elements, as plain values."""
    if not _is_collection(kind):
        return value.removeprefix("=")  # click passes "=2" for -v=2
    parts = [part.strip() for text in value for part in text.split(",") if part.strip()]
    if kind == tuple[str, ...]:
        return parts
    pairs = [part.partition("=") for part in parts]
    return {key.strip(): text.strip().lower() for key, _, text in pairs}


def ebpflb_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that kube-proxy does not have to the decorated command; None means not
    given.
    """
    for kind in (Paths, Options):
        for _, flag, default in reversed(list(flags_of(kind))):
            command = _own_option(flag, default)(command)
    for name in REMOVED_OPTIONS:
        command = click.option(name, hidden=True, expose_value=False, callback=_removed)(command)
    return command


def removed_settings(context: click.Context) -> dict[str, str]:
    """Return the removed settings on the command line, each with what has become of it."""
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
        callback=common.parsed(flag.parse or (lambda value: value)),
        help=f"{flag.help}  [default: {shown}]" if shown else flag.help,
        **alone,
    )


class _Choice(click.Choice[str]):
    """A choice that also accepts values that were removed, and replaces them with current ones."""

    def __init__(self, flag: Flag) -> None:
        super().__init__(flag.choices)
        self._flag = flag

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if ctx and (instead := self._flag.removed.get(value)):
            text = f"was removed; {instead} is used instead"
            removed_settings(ctx)[f"{self._flag.name}={value}"] = text
            value = str(instead)
        return super().convert(value, param, ctx)


def format_value(value: Any) -> str:
    """Format a value as Go's pflag and component-base do: true, [a,b], A=true,B=false."""
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


# The values of the options -> a valid KubeProxyConfiguration; and back to flags, for /flagz.
#
# ``values`` is always what click passes to ``run``: by argument name, None for a flag that is not
# on the command line.

log = logging.getLogger(__name__)

# The deprecated flags that set the port of an address.
_PORT_FLAGS = {"healthzBindAddress": "healthz_port", "metricsBindAddress": "metrics_port"}
# The defaults of flags without a field; "" for the others.
_DEFAULTS = {
    "cleanup": False,
    "init-only": False,
    "version": False,
    "healthz-port": fields.HEALTHZ_PORT,
    "metrics-port": fields.METRICS_PORT,
}


def load(values: Mapping[str, Any]) -> KubeProxyConfiguration:
    """Return the configuration from the file of --config, or else from the flags.

    Raises ConfigurationError with a line for each error.
    """
    if values["config"] is None:
        config = from_flags(values)
        _raise_if_any(describe(error) for error in validation.check(config))
        return config
    path = Path(values["config"])
    config = override(config_file.read(path), values)
    _raise_if_any(f"{path}: {each}" for each in validation.check(config))
    return config


def from_flags(values: Mapping[str, Any]) -> KubeProxyConfiguration:
    """Return the defaults with the values of the flags on the command line."""
    flags = explicit_flags(values)
    config = _with_flags(KubeProxyConfiguration(), values, flags)
    paths = {path for each in PARAMETERS if each.flag in flags for path in each.fields.split()}
    ports = {path: values[flag] for path, flag in _PORT_FLAGS.items() if values[flag] is not None}
    config = fields.complete_listen_address(config, paths & set(fields.LISTEN_FIELDS), ports)
    for path, port in ports.items():
        config = config if port else replace_at(config, path, "")
    return config


def override(config: KubeProxyConfiguration, values: Mapping[str, Any]) -> KubeProxyConfiguration:
    """Return the file's configuration with the flags that override it (kube-proxy.md 15)."""
    return _with_flags(config, values, _effective_with(config, values))


def _effective_with(config: KubeProxyConfiguration, values: Mapping[str, Any]) -> set[str]:
    """Return the flags that have an effect beside the file: "auto" unless the file decides."""
    effective = explicit_flags(values) & EFFECTIVE_WITH_CONFIG
    is_decided = isinstance(config.conntrack.tcp_be_liberal, bool)
    if values[LIBERAL.replace("-", "_")] == "auto" and not is_decided:
        effective.add(LIBERAL)
    return effective


def explicit_flags(values: Mapping[str, Any]) -> set[str]:
    """Return kube-proxy's flags that are on the command line."""
    flags = (each for each in PARAMETERS if each.flags)
    return {each.flag for each in flags if values.get(argument_name(each)) not in (None, ())}


def describe(error: FieldError) -> str:
    """Describe an error with the name of the flag that sets the field."""
    path = error.path.partition("[")[0]
    flags = [each.flag for each in PARAMETERS if each.flag and path in each.fields.split()]
    return f"--{flags[0]}: {error.reason}" if flags else str(error)


def _with_flags(
    config: KubeProxyConfiguration, values: Mapping[str, Any], flags: set[str]
) -> KubeProxyConfiguration:
    for parameter in PARAMETERS:
        for path in parameter.fields.split() if parameter.flag in flags else ():
            config = replace_at(config, path, values[argument_name(parameter)])
    return config


def _raise_if_any(errors: Iterable[str]) -> None:
    text = "".join(f"\n  {error}" for error in errors)
    if text:
        raise ConfigurationError(f"the configuration is invalid:{text}")


def write(config: KubeProxyConfiguration, path: Path) -> None:
    """Write a file for --config. Raises ConfigurationError if that fails."""
    with instead_of_os_error(str(path), ConfigurationError):
        path.write_text(fields.as_yaml(config))
    log.info("%s: written", path)


def warn_about_ignored(config: KubeProxyConfiguration, values: Mapping[str, Any]) -> None:
    """Log the flags, fields and feature gates that are set but have no effect."""
    flags = explicit_flags(values)
    if values["config"] is None:
        ignored = parameters.ignored_flags(flags)
    else:
        effective = _effective_with(config, values)
        ignored = [*parameters.ignored_fields(config), *parameters.ignored_flags(effective)]
        _warn("overridden by --config", [f"--{flag}" for flag in sorted(flags - effective)])
    _warn("accepted, but ignored", ignored)
    _warn("feature gates without effect", translation.ignored_gates(config))
    unknown = translation.unknown_schedulers(config)
    _warn(
        "ipvs.scheduler has no counterpart in ebpflb, so connections are spread at random", unknown
    )


def _warn(what: str, names: list[str]) -> None:
    if names:
        log.warning("%s: %s", what, ", ".join(names))


def node_name(config: KubeProxyConfiguration, host_name: str) -> str:
    """Return the node's name, trimmed and in lower case as kube-proxy does (kube-proxy.md 17)."""
    return (config.hostname_override or host_name).strip().lower()


def effective_flags(options: Options, values: Mapping[str, Any]) -> dict[str, str]:
    """Return all options of ``run`` with the effective value, formatted as in Go, for /flagz.

    A flag that has a field shows the field's value, whether the file or a flag has set it. If it
    has several fields, the field of the mode's section counts.
    """
    effective: dict[str, Any] = {}
    for group in (options.paths, options):
        for name, flag, _ in flags_of(group):
            effective[flag.name[2:]] = flag.shown(getattr(group, name))
    for parameter in PARAMETERS:
        if parameter.flag:
            config = cast(KubeProxyConfiguration, options.configuration)
            effective[parameter.flag] = _effective_value(parameter, config, values)
    return {name: redact(format_value(value)) for name, value in effective.items()}


def _effective_value(
    parameter: Parameter, config: KubeProxyConfiguration, values: Mapping[str, Any]
) -> Any:
    if not parameter.fields:
        value = values.get(argument_name(parameter))
        return _DEFAULTS.get(parameter.flag) if value is None else value
    paths = parameter.fields.split()
    in_section = [path for path in paths if path.startswith(f"{config.mode}.")]
    return value_at(config, (in_section or paths)[0])
