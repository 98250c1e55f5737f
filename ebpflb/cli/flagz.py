# SPDX-License-Identifier: Apache-2.0
"""/flagz: every flag of ``ebpflb run`` with the value in force, spelled as Go does."""

from collections.abc import Mapping
from typing import Any

from ebpflb.cli import choices, flags
from ebpflb.configuration.fields import HEALTHZ_PORT, METRICS_PORT, KubeProxyConfiguration, value_at
from ebpflb.configuration.parameters import PARAMETERS, Parameter

# What those say that are not given and have no field; others "".
_UNSAID = {
    "cleanup": False,
    "init-only": False,
    "version": False,
    "healthz-port": HEALTHZ_PORT,
    "metrics-port": METRICS_PORT,
}


def in_force(found: KubeProxyConfiguration, chosen: Mapping[str, Any]) -> dict[str, str]:
    """From what is served and what was ``chosen``; fields count, whether a file or a flag set them,
    of masqueradeAll and the like those of the mode.
    """
    own = dict(chosen) | {"masquerade_ports": choices.port_text(chosen["masquerade_ports"])}
    values = {name.replace("_", "-"): value for name, value in own.items()}
    for row in PARAMETERS:
        if row.flag:
            values[row.flag] = _value(row, found, chosen)
    return {name: spelled(value) for name, value in values.items()}


def _value(row: Parameter, found: KubeProxyConfiguration, chosen: Mapping[str, Any]) -> Any:
    if row.fields:
        paths = row.fields.split()
        of_mode = [path for path in paths if path.startswith(f"{found.mode}.")]
        value = value_at(found, (of_mode or paths)[0])
        return {it.file_pattern: it.verbosity for it in value} if row.flag == "vmodule" else value
    value = chosen.get(flags.name(row))
    return _UNSAID.get(row.flag) if value is None else value


def spelled(value: Any) -> str:
    """As the flags of Go's pflag and component-base write theirs: true, [a,b], A=true,B=false."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case dict():
            return ",".join(f"{name}={spelled(it)}" for name, it in sorted(value.items()))
        case tuple():
            return f"[{','.join(value)}]"
    return str(value)
