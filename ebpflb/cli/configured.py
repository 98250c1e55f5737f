# SPDX-License-Identifier: Apache-2.0
"""What ``ebpflb run`` is to do by kube-proxy's file or flags: read, checked, remarked upon."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ebpflb.cli import flags
from ebpflb.configuration import config_file, fields, parameters, translation, validation
from ebpflb.configuration.fields import KubeProxyConfiguration
from ebpflb.errors import ConfigurationError

log = logging.getLogger(__name__)


def configuration(values: Mapping[str, Any]) -> KubeProxyConfiguration:
    """Raises ConfigurationError with a line for everything that is wrong with it."""
    if values["config"] is None:
        found = flags.said(values)
        _refuse(flags.line(wrong) for wrong in validation.check(found))
        return found
    path = Path(values["config"])
    read = config_file.read(path)
    found = flags.beside_file(read.configuration, values)
    unread = {
        each.path for each in read.errors
    }  # there the default stands, which is nobody's error
    senseless = [each for each in validation.check(found) if each.path not in unread]
    _refuse(f"{path}: {each}" for each in (*senseless, *read.errors))
    return found


def write(found: KubeProxyConfiguration, path: Path) -> None:
    """As YAML, fit for --config. Raises ConfigurationError where it cannot be written."""
    try:
        path.write_text(fields.as_yaml(found))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    log.info("%s: written", path)


def remark(found: KubeProxyConfiguration, values: Mapping[str, Any]) -> None:
    """One line each for what has no effect here, by name."""
    given = flags.given(values)
    if values["config"] is None:
        idle = parameters.ignored_flags(given)
    else:
        idle = [
            *parameters.ignored_fields(found),
            *parameters.ignored_flags(given & parameters.EFFECTIVE_WITH_CONFIG),
        ]
        _say(
            "replaced by --config",
            [f"--{flag}" for flag in sorted(given - parameters.EFFECTIVE_WITH_CONFIG)],
        )
    _say("accepted, and without effect here", idle)
    _say("feature gates without effect here", translation.ignored_gates(found))


def node_name(found: KubeProxyConfiguration, host_name: str) -> str:
    """As kube-proxy makes it: trimmed and lower-case (kube-proxy.md 17)."""
    return (found.hostname_override or host_name).strip().lower()


def _say(what: str, names: list[str]) -> None:
    if names:
        log.warning("%s: %s", what, ", ".join(names))


def _refuse(lines: Iterable[str]) -> None:
    text = "".join(f"\n  {line}" for line in lines)
    if text:
        raise ConfigurationError(f"the configuration is invalid:{text}")
