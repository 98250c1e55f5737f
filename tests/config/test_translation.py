# SPDX-License-Identifier: Apache-2.0
"""The effects of a configuration on the agent (kube-proxy.md 15)."""

from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from ebpflb.config import config_file, fields
from ebpflb.config.fields import KubeProxyConfiguration
from ebpflb.config.parameters import PARAMETERS
from ebpflb.config.translation import translate
from ebpflb.model.addresses import Duration
from ebpflb.model.devices import LocalDetector, LocalMode
from ebpflb.options import ConntrackOptions, Options
from tests.config.files import HEAD


def made(**values: Any) -> Options:
    found = config_file.to_configuration(HEAD | values)
    return Options(None, "node-1", Path(), **translate(found))  # type: ignore[arg-type]


def test_nothing_said() -> None:
    """A configuration that says nothing is what the agent does without one."""
    options = made()
    assert options == Options(
        None,  # type: ignore[arg-type]
        "node-1",
        Path(),
        configuration=options.configuration,
    )


@pytest.mark.parametrize(
    ("mode", "everything", "mark", "periods"),
    [
        ("", True, 0x20, (10, 1)),
        ("iptables", True, 0x20, (10, 1)),
        ("ipvs", True, 0x20, (20, 2)),
        ("nftables", False, 1, (40, 4)),
    ],
)
def test_section_of_the_mode(
    mode: str, everything: bool, mark: int, periods: tuple[int, int]
) -> None:
    """masqueradeAll, masqueradeBit and the periods are those of the mode; ipvs has the first two of
    iptables.
    """
    options = made(
        mode=mode,
        iptables={
            "masqueradeAll": True,
            "masqueradeBit": 5,
            "syncPeriod": "10s",
            "minSyncPeriod": "1s",
        },
        ipvs={"syncPeriod": "20s", "minSyncPeriod": "2s"},
        nftables={"masqueradeBit": 0, "syncPeriod": "40s", "minSyncPeriod": "4s"},
    )
    assert (options.masquerade_all, options.masquerade_mark) == (everything, mark)
    assert (options.sync_period, options.min_sync_period) == periods


@pytest.mark.parametrize(
    ("values", "detector"),
    [
        ({}, LocalDetector()),
        (
            {"clusterCIDR": "10.244.0.0/16, fd00::/56"},
            LocalDetector(cluster_cidrs=(ip_network("10.244.0.0/16"), ip_network("fd00::/56"))),
        ),
        ({"detectLocalMode": "NodeCIDR", "clusterCIDR": "x"}, LocalDetector(LocalMode.NODE_CIDR)),
        (
            {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cni0"}},
            LocalDetector(LocalMode.BRIDGE, bridge="cni0"),
        ),
        (
            {
                "detectLocalMode": "InterfaceNamePrefix",
                "detectLocal": {"interfaceNamePrefix": "veth"},
            },
            LocalDetector(LocalMode.NAME_PREFIX, name_prefix="veth"),
        ),
    ],
)
def test_detect_local_modes(values: dict[str, Any], detector: LocalDetector) -> None:
    """Each mode, and the field that it uses (kube-proxy.md 5.2)."""
    assert made(**values).detector == detector


def test_conntrack() -> None:
    """Timeouts come in whole seconds."""
    options = made(
        conntrack={
            "maxPerCore": 0,
            "min": 7,
            "tcpEstablishedTimeout": "2h",
            "tcpCloseWaitTimeout": "0s",
            "tcpBeLiberal": True,
            "udpTimeout": "500ms",
            "udpStreamTimeout": "1m",
        }
    )
    assert options.conntrack == ConntrackOptions(0, 7, 7200, 0, True, 1, 60)


@pytest.mark.parametrize(
    ("gates", "allowed"),
    [({}, True), ({"AllowServiceExternalIPs": False}, False), ({"Other": False}, True)],
)
def test_allow_service_external_ips(gates: dict[str, bool], allowed: bool) -> None:
    """The one gate that matters."""
    assert made(featureGates=gates).serve_external_ips is allowed


# Other values of fields whose type allows only some.
OTHERS: dict[str, Any] = {
    "bindAddress": "192.0.2.1",
    "clusterCIDR": "10.0.0.0/8",
    "detectLocalMode": "NodeCIDR",
    "featureGates": {"AllowServiceExternalIPs": False},
    "ipvs.scheduler": "lc",
    "nodePortAddresses": ("10.0.0.0/8",),
}
READ_BY_RUN = {"hostnameOverride", "logging.format", "logging.verbosity", "mode"}


def another(value: Any) -> Any:
    """A value of the same type."""
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, bool):
        return not value
    return Duration(value + fields.SECOND) if isinstance(value, Duration) else value + 1


@pytest.mark.parametrize(
    "path", [path for each in PARAMETERS if not each.ignored for path in each.fields.split()]
)
def test_every_honoured_field_has_an_effect(path: str) -> None:
    """Every field has an effect in the mode whose section it is in; ``run`` itself reads a few."""
    section = path.partition(".")[0]
    config = KubeProxyConfiguration(mode=section if section in ("nftables", "ipvs") else "")
    before, usual = fields.value_at(config, path), translate(config)
    value = OTHERS[path] if path in OTHERS else another(before)
    changed = translate(fields.replace_at(config, path, value))
    differ = {name for name in usual if changed[name] != usual[name]} - {"configuration"}
    assert bool(differ) != (path in READ_BY_RUN)


@pytest.mark.parametrize("mode", ["", "iptables", "ipvs", "nftables"])
def test_nodeport_addresses_default(mode: str) -> None:
    """Unset is the primary address, in every mode (kube-proxy.md 12, row 3)."""
    assert made(mode=mode).nodeport_addresses == ("primary",)
    assert made(mode=mode, nodePortAddresses=["10.0.0.0/8"]).nodeport_addresses == ("10.0.0.0/8",)


def test_no_pause() -> None:
    """minSyncPeriod 0, or not set, means no pause."""
    assert made().min_sync_period == 0
    assert made(iptables={"minSyncPeriod": "0s"}).min_sync_period == 0


@pytest.mark.parametrize(
    ("text", "address"),
    [("0.0.0.0", None), ("::", None), ("", None), ("192.0.2.7", "192.0.2.7"), ("fd00::7",) * 2],
)
def test_bind_address(text: str, address: str | None) -> None:
    """An unspecified address says nothing."""
    assert made(bindAddress=text).bind_address == (ip_address(address) if address else None)
