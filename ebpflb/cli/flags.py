# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's flags as options of click, made of ``configuration.parameters``; and what they say.

Go's way to write them is understood: ``--flag=value``, ``--flag value``, a boolean as ``--flag`` or
``--flag=false``, and underscores for dashes. What was not given is None.
"""

from collections.abc import Callable, Mapping
from typing import Any, get_origin

import click
import msgspec

from ebpflb.configuration import listen_addresses
from ebpflb.configuration.config_file import FieldError, decode
from ebpflb.configuration.durations import Duration, FlushFrequency
from ebpflb.configuration.fields import KubeProxyConfiguration, VModule, replace_at, value_at
from ebpflb.configuration.parameters import EFFECTIVE_WITH_CONFIG, PARAMETERS, Parameter, type_of

DETAILS = 4  # the verbosity from which on details are logged
LIKE_GO = {"token_normalize_func": lambda name: name.replace("_", "-")}

_KINDS = {"cleanup": bool, "init-only": bool, "healthz-port": int, "metrics-port": int}
_PORTS = {"healthzBindAddress": "healthz_port", "metricsBindAddress": "metrics_port"}
_FILE = click.Path(exists=True, dir_okay=False)
_FILES = {"config", "kubeconfig", "write-config-to"}


def every(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: all flags of kube-proxy but --version."""
    for row in reversed(PARAMETERS):
        if row.flags and row.flag != "version":
            command = _option(row)(command)
    return command


def name(row: Parameter) -> str:
    """By which click hands its value over."""
    return row.flag.replace("-", "_")


def given(values: Mapping[str, Any]) -> set[str]:
    """The flags that are on the command line."""
    return {row.flag for row in PARAMETERS if row.flags and values.get(name(row)) not in (None, ())}


def said(values: Mapping[str, Any]) -> KubeProxyConfiguration:
    """What the flags say together."""
    found = _laid_over(KubeProxyConfiguration(), values, given(values))
    by_flag = {
        path for row in PARAMETERS for path in row.fields.split() if row.flag in given(values)
    }
    ports = {path: values[flag] for path, flag in _PORTS.items() if values[flag] is not None}
    found = listen_addresses.complete(found, by_flag & set(listen_addresses.PATHS), ports)
    for path, port in ports.items():
        found = found if port else replace_at(found, path, "")
    return found


def beside_file(found: KubeProxyConfiguration, values: Mapping[str, Any]) -> KubeProxyConfiguration:
    """The file's configuration with those flags that count even so (kube-proxy.md 15)."""
    return _laid_over(found, values, given(values) & EFFECTIVE_WITH_CONFIG)


def line(wrong: FieldError) -> str:
    """The error, naming the flag that sets the field."""
    field = wrong.path.partition("[")[0]
    flags = [row.flag for row in PARAMETERS if row.flag and field in row.fields.split()]
    return f"--{flags[0]}: {wrong.reason}" if flags else str(wrong)


def _laid_over(
    found: KubeProxyConfiguration, values: Mapping[str, Any], flags: set[str]
) -> KubeProxyConfiguration:
    for row in PARAMETERS:
        for path in row.fields.split() if row.flag in flags else ():
            found = replace_at(found, path, values[name(row)])
    return found


def _option(row: Parameter) -> Callable[[Any], Any]:
    kind = _KINDS.get(row.flag, str) if not row.fields else type_of(row)
    alone: dict[str, Any] = {}  # what it says where no value follows
    if kind is bool or row.flag == "v":
        alone = {"is_flag": False, "flag_value": "true" if kind is bool else str(DETAILS)}
    return click.option(
        name(row),
        *(f"-{flag}" for flag in row.flags.split() if len(flag) == 1),
        *(f"--{flag}" for flag in row.flags.split()),
        type=_FILE if row.flag == "kubeconfig" else click.STRING,
        multiple=_is_many(kind),
        metavar=_metavar(row, kind),
        callback=_reading(kind),
        help=row.help + _default(row),
        hidden=row.ignored,
        **alone,
    )


def _metavar(row: Parameter, kind: Any) -> str:
    if row.flag in _FILES:
        return "FILE"
    plain = {bool: "true|false", str: "TEXT", dict[str, bool]: "GATE=BOOL"}
    plain |= dict.fromkeys((Duration, FlushFrequency), "DURATION")
    return plain.get(kind, "LIST" if _is_many(kind) else "NUMBER")


def _default(row: Parameter) -> str:
    """As kube-proxy's help shows it, where there is one."""
    if not row.fields:
        return ""
    default = listen_addresses.complete(KubeProxyConfiguration(), frozenset())
    value = value_at(default, row.fields.split()[0])
    shown = value and not isinstance(value, bool | tuple | dict)
    return f"  [default: {value}]" if shown else ""


def _is_many(kind: Any) -> bool:
    return get_origin(kind) in (tuple, dict)


def _reading(kind: Any) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback for click: the text as the type of the field."""

    def read(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        if value is None or value == ():
            return None
        try:
            plain = _plain(kind, value)
            return msgspec.convert(plain, kind, strict=False, dec_hook=decode)
        except (msgspec.ValidationError, ValueError) as error:
            text = str(error).partition(" - at ")[0].replace("`", "")
            raise click.BadParameter(f"{_text(value)}: {text}") from error

    return read


def _plain(kind: Any, value: Any) -> Any:
    """Lists and mappings are written with commas, and may be repeated."""
    if not _is_many(kind):
        return value.removeprefix("=")  # -v=2
    parts = [part.strip() for text in value for part in text.split(",") if part.strip()]
    if kind == tuple[str, ...]:
        return parts
    pairs = [part.partition("=") for part in parts]
    if get_origin(kind) is dict:
        return {key.strip(): text.strip().lower() for key, _, text in pairs}
    return [VModule(file_pattern=key, verbosity=int(text)) for key, _, text in pairs]


def _text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else f'"{",".join(value)}"'
