# SPDX-License-Identifier: Apache-2.0
"""Check the values of a configuration by kube-proxy's rules; find all errors (kube-proxy.md 15).

As in kube-proxy, section ipvs is only checked in mode ipvs, and clusterCIDR only in detectLocalMode
ClusterCIDR.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ebpflb.config import listen_addresses
from ebpflb.config.fields import IPVS, Conntrack, KubeProxyConfiguration, join_path, value_at
from ebpflb.model import devices
from ebpflb.model.addresses import family, parse_address, parse_network
from ebpflb.model.devices import LocalMode

_MODES = ("iptables", "ipvs", "nftables")
LOG_FORMATS = ("text", "json")

_PORT_RANGE = re.compile(r"(\d{1,5})(?:([-+])(\d{1,5}))?", re.ASCII)
_LAST_PORT = 65535

# The field that a detectLocalMode requires.
_REQUIRED = {
    LocalMode.BRIDGE.value: "detectLocal.bridgeInterface",
    LocalMode.NAME_PREFIX.value: "detectLocal.interfaceNamePrefix",
}


class FieldError(NamedTuple):
    """The path of an invalid field, and the error of its value."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def check(config: KubeProxyConfiguration) -> Iterator[FieldError]:
    """Yield all errors; none if the configuration is valid."""
    yield from _one_of("mode", config.mode, ("", *_MODES))
    yield from _periods(config)
    yield from _numbers(config)
    yield from _durations("conntrack", config.conntrack)
    if config.mode == "ipvs":
        yield from _durations("ipvs", config.ipvs)
        yield from _networks("ipvs.excludeCIDRs", config.ipvs.exclude_cidrs)
    yield from _addresses(config)
    yield from _networks("nodePortAddresses", config.node_port_addresses, devices.is_word)
    yield from _detect_local(config)
    yield from _one_of("logging.format", config.logging.format, LOG_FORMATS)
    if config.hostname_override and not config.hostname_override.strip():
        yield FieldError("hostnameOverride", "must not be blank")
    if config.port_range and not _is_port_range(config.port_range):
        reason = f'"{config.port_range}" is not a range of ports such as 300-2000'
        yield FieldError("portRange", reason)


def _periods(config: KubeProxyConfiguration) -> Iterator[FieldError]:
    """Check the sync periods of the mode's section, and configSyncPeriod."""
    section = config.mode if config.mode in _MODES else _MODES[0]
    longest, shortest = config.mode_section.sync_period, config.mode_section.min_sync_period
    if longest <= 0:
        yield FieldError(f"{section}.syncPeriod", f"must be greater than 0, not {longest}")
    if shortest < 0:
        yield FieldError(f"{section}.minSyncPeriod", f"must be at least 0, not {shortest}")
    if shortest > longest:
        reason = f"must be at least {section}.minSyncPeriod ({shortest}), not {longest}"
        yield FieldError(f"{section}.syncPeriod", reason)
    if config.config_sync_period <= 0:
        reason = f"must be greater than 0, not {config.config_sync_period}"
        yield FieldError("configSyncPeriod", reason)


def _numbers(config: KubeProxyConfiguration) -> Iterator[FieldError]:
    limits = {
        "iptables.masqueradeBit": (0, 31),
        "oomScoreAdj": (-1000, 1000),
        "conntrack.maxPerCore": (0, None),
        "conntrack.min": (0, None),
        "clientConnection.burst": (0, None),
    }
    if config.mode == "nftables":
        limits["nftables.masqueradeBit"] = (0, 31)
    for path, (least, most) in limits.items():
        value = value_at(config, path)
        if most is not None and not least <= value <= most:
            yield FieldError(path, f"must be between {least} and {most}, not {value}")
        elif value < least:
            yield FieldError(path, f"must be at least {least}, not {value}")


def _durations(path: str, section: Conntrack | IPVS) -> Iterator[FieldError]:
    names = {
        "conntrack": ("tcpEstablishedTimeout", "tcpCloseWaitTimeout", "udpTimeout"),
        "ipvs": ("tcpTimeout", "tcpFinTimeout", "udpTimeout"),
    }[path] + (("udpStreamTimeout",) if path == "conntrack" else ())
    for name in names:
        value = value_at(section, name)
        if value < 0:
            yield FieldError(join_path(path, name), f"must be at least 0, not {value}")


def _addresses(config: KubeProxyConfiguration) -> Iterator[FieldError]:
    try:
        parse_address(config.bind_address)
    except ValueError as error:
        yield FieldError("bindAddress", str(error))
    for path in listen_addresses.LISTEN_FIELDS:
        text = value_at(config, path)
        try:
            if text:
                listen_addresses.parse_listen_address(text)
        except ValueError as error:
            yield FieldError(path, str(error))


def _networks(
    path: str, texts: tuple[str, ...], is_word: Callable[[str], bool] = lambda text: False
) -> Iterator[FieldError]:
    """Check CIDRs; words are also valid."""
    for index, text in enumerate(texts):
        try:
            if not is_word(text):
                parse_network(text)
        except ValueError as error:
            yield FieldError(join_path(path, index), str(error))


def _detect_local(config: KubeProxyConfiguration) -> Iterator[FieldError]:
    mode = config.detect_local_mode
    yield from _one_of("detectLocalMode", mode, tuple(each.value for each in LocalMode))
    if mode in _REQUIRED and not value_at(config, _REQUIRED[mode]):
        yield FieldError(_REQUIRED[mode], f"must be set in detectLocalMode {mode}")
    if mode == LocalMode.CLUSTER_CIDR and config.cluster_cidr:
        texts = cluster_cidrs(config)
        errors = list(_networks("clusterCIDR", texts))
        yield from (FieldError("clusterCIDR", each.reason) for each in errors)
        if not errors and len({family(parse_network(text)) for text in texts}) < len(texts):
            reason = f'"{config.cluster_cidr}" has more than one CIDR of the same family'
            yield FieldError("clusterCIDR", reason)


def cluster_cidrs(config: KubeProxyConfiguration) -> tuple[str, ...]:
    """Return clusterCIDR, split at the comma: one CIDR, or one of each family."""
    return tuple(text.strip() for text in config.cluster_cidr.split(","))


def _one_of(path: str, text: str, valid: tuple[str, ...]) -> Iterator[FieldError]:
    if text not in valid:
        values = ", ".join(filter(None, valid))
        yield FieldError(path, f'must be one of {values}, not "{text}"')


def _is_port_range(text: str) -> bool:
    """Whether the text is PORT, FIRST-LAST or FIRST+COUNT."""
    found = _PORT_RANGE.fullmatch(text)
    if not found:
        return False
    first, count = int(found[1]), int(found[3] or 0)
    last = {"-": count, "+": first + count}.get(found[2], first)
    return first <= last <= _LAST_PORT
