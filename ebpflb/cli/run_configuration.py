# SPDX-License-Identifier: Apache-2.0
"""The values of the options of ``ebpflb run`` -> a valid KubeProxyConfiguration; and back to flags,
for /flagz.

``values`` is everywhere what click passes to ``run``: by argument name, None for a flag that is not
on the command line.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from ebpflb.cli.run_options import argument_name, format_value
from ebpflb.config import config_file, fields, parameters, translation, validation
from ebpflb.config.fields import KubeProxyConfiguration, replace_at, value_at
from ebpflb.config.parameters import EFFECTIVE_WITH_CONFIG, PARAMETERS, Parameter
from ebpflb.config.validation import FieldError
from ebpflb.errors import ConfigurationError
from ebpflb.options import Options, flags_of
from ebpflb.redaction import redact

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
    """From the file of --config, or else from the flags.

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
    """The defaults and, in their place, the values of the flags on the command line."""
    flags = explicit_flags(values)
    config = _with_flags(KubeProxyConfiguration(), values, flags)
    paths = {path for each in PARAMETERS if each.flag in flags for path in each.fields.split()}
    ports = {path: values[flag] for path, flag in _PORT_FLAGS.items() if values[flag] is not None}
    config = fields.complete_listen_address(config, paths & set(fields.LISTEN_FIELDS), ports)
    for path, port in ports.items():
        config = config if port else replace_at(config, path, "")
    return config


def override(config: KubeProxyConfiguration, values: Mapping[str, Any]) -> KubeProxyConfiguration:
    """The file's configuration with the flags that override it (kube-proxy.md 15)."""
    return _with_flags(config, values, explicit_flags(values) & EFFECTIVE_WITH_CONFIG)


def explicit_flags(values: Mapping[str, Any]) -> set[str]:
    """The flags of kube-proxy that are on the command line."""
    flags = (each for each in PARAMETERS if each.flags)
    return {each.flag for each in flags if values.get(argument_name(each)) not in (None, ())}


def describe(error: FieldError) -> str:
    """The error with the name of the flag that sets the field."""
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
    """Writes a file for --config. Raises ConfigurationError if that fails."""
    try:
        path.write_text(fields.as_yaml(config))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    log.info("%s: written", path)


def warn_about_ignored(config: KubeProxyConfiguration, values: Mapping[str, Any]) -> None:
    """Logs the flags, fields and feature gates that are set but have no effect."""
    flags = explicit_flags(values)
    if values["config"] is None:
        ignored = parameters.ignored_flags(flags)
    else:
        effective = flags & EFFECTIVE_WITH_CONFIG
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
    """Trimmed and in lower case, as kube-proxy does (kube-proxy.md 17)."""
    return (config.hostname_override or host_name).strip().lower()


def effective_flags(options: Options, values: Mapping[str, Any]) -> dict[str, str]:
    """All options of ``run`` with the value in effect, formatted as by Go, for /flagz.

    A flag that has a field shows the field's value, whether the file or a flag has set it; of
    several fields, that of the mode's section.
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
