# SPDX-License-Identifier: Apache-2.0
"""The effects of a configuration on the agent (kube-proxy.md 15)."""

from pathlib import Path
from typing import Any

import pytest

from ebpflb.config import config_file, fields
from ebpflb.config.fields import KubeProxyConfiguration
from ebpflb.config.parameters import PARAMETERS
from ebpflb.config.translation import translate
from ebpflb.model.addresses import Duration
from ebpflb.options import Options
from tests.config.files import HEAD


def made(**values: Any) -> Options:
    found = config_file.to_configuration(HEAD | values)
    return Options(None, "node-1", Path(), **translate(found))  # type: ignore[arg-type]


def test_nothing_said() -> None:
    """An empty configuration gives the agent's own defaults."""
    options = made()
    assert options == Options(
        None,  # type: ignore[arg-type]
        "node-1",
        Path(),
        configuration=options.configuration,
    )


# Other values of fields whose type allows only some.
OTHERS: dict[str, Any] = {
    "bindAddress": "192.0.2.1",
    "clusterCIDR": "10.0.0.0/8",
    "conntrack.tcpBeLiberal": True,
    "detectLocalMode": "NodeCIDR",
    "featureGates": {"AllowServiceExternalIPs": False},
    "ipvs.scheduler": "lc",
    "nodePortAddresses": ("10.0.0.0/8",),
}
READ_BY_RUN = {"hostnameOverride", "logging.format", "logging.verbosity", "mode"}


def another(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, bool):
        return not value
    return Duration(value + 48 * 3600 * fields.SECOND) if isinstance(value, Duration) else value + 1


@pytest.mark.parametrize(
    "path", [path for each in PARAMETERS if not each.ignored for path in each.fields.split()]
)
def test_every_honoured_field_has_an_effect(path: str) -> None:
    """Every field has an effect in the mode whose section it is in; ``run`` itself reads a few
    fields.
    """
    section = path.partition(".")[0]
    config = KubeProxyConfiguration(mode=section if section in ("nftables", "ipvs") else "")
    before, usual = fields.value_at(config, path), translate(config)
    value = OTHERS[path] if path in OTHERS else another(before)
    changed = translate(fields.replace_at(config, path, value))
    differ = {name for name in usual if changed[name] != usual[name]} - {"configuration"}
    assert bool(differ) != (path in READ_BY_RUN)
