# SPDX-License-Identifier: Apache-2.0
"""Check the values of a configuration by kube-proxy's rules; find all errors (kube-proxy.md 15).

clusterCIDR is only checked in detectLocalMode ClusterCIDR, as in kube-proxy. Whether addresses fit
the node's families is checked later, once the Node is known.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ebpflb.config import fields
from ebpflb.config.fields import KubeProxyConfiguration, join_path, value_at
from ebpflb.errors import ConfigurationError
from ebpflb.model import devices
from ebpflb.model.addresses import (
    Family,
    Network,
    family,
    parse_address,
    parse_host_port,
    parse_network,
)
from ebpflb.model.devices import LocalMode

log = logging.getLogger(__name__)

_MODES = ("iptables", "ipvs", "nftables")
_CHOICES = {
    "mode": ("", *_MODES),
    "detectLocalMode": tuple(each.value for each in LocalMode),
    "logging.format": ("text", "json"),
}
# The least and the greatest value.
_LIMITS = {
    "iptables.masqueradeBit": (0, 31),
    "oomScoreAdj": (-1000, 1000),
    **dict.fromkeys(
        (
            *("conntrack.maxPerCore", "conntrack.min", "conntrack.tcpEstablishedTimeout"),
            *("conntrack.tcpCloseWaitTimeout", "conntrack.udpTimeout"),
            *("conntrack.udpStreamTimeout", "clientConnection.burst"),
        ),
        (0, math.inf),
    ),
}
_TIMEOUTS = ("ipvs.tcpTimeout", "ipvs.tcpFinTimeout", "ipvs.udpTimeout")
_LIMITS_OF_MODE: Mapping[str, Mapping[str, tuple[int, float]]] = {
    "ipvs": dict.fromkeys(_TIMEOUTS, (0, math.inf)),
    "nftables": {"nftables.masqueradeBit": (0, 31)},
}
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
    for path, valid in _CHOICES.items():
        if (text := value_at(config, path)) not in valid:
            values = ", ".join(filter(None, valid))
            yield FieldError(path, f'must be one of {values}, not "{text}"')
    yield from _periods(config)
    yield from _numbers(config)
    yield from _addresses(config)
    yield from _cidrs("nodePortAddresses", config.node_port_addresses, devices.is_word)
    yield from _detect_local(config)
    if config.hostname_override and not config.hostname_override.strip():
        yield FieldError("hostnameOverride", "must not be blank")


def _periods(config: KubeProxyConfiguration) -> Iterator[FieldError]:
    """Check the sync periods of the mode's section, and configSyncPeriod."""
    section = config.mode if config.mode in _MODES else _MODES[0]
    longest, shortest = config.mode_section.sync_period, config.mode_section.min_sync_period
    periods = {f"{section}.syncPeriod": longest, "configSyncPeriod": config.config_sync_period}
    for path, period in periods.items():
        if period <= 0:
            yield FieldError(path, f"must be greater than 0, not {period}")
    if shortest < 0:
        yield FieldError(f"{section}.minSyncPeriod", f"must be at least 0, not {shortest}")
    if shortest > longest:
        reason = f"must be at least {section}.minSyncPeriod ({shortest}), not {longest}"
        yield FieldError(f"{section}.syncPeriod", reason)


def _numbers(config: KubeProxyConfiguration) -> Iterator[FieldError]:
    for path, (least, most) in {**_LIMITS, **_LIMITS_OF_MODE.get(config.mode, {})}.items():
        value = value_at(config, path)
        if not least <= value <= most:
            allowed = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            yield FieldError(path, f"must be {allowed}, not {value}")


def _addresses(config: KubeProxyConfiguration) -> Iterator[FieldError]:
    parsers: dict[str, Callable[[str], object]] = {"bindAddress": parse_address}
    parsers |= dict.fromkeys(fields.LISTEN_FIELDS, parse_host_port)
    for path, parse in parsers.items():
        text = value_at(config, path)
        try:
            if text or path == "bindAddress":
                parse(text)
        except ValueError as error:
            yield FieldError(path, str(error))


def _cidrs(
    path: str, texts: Iterable[str], is_word: Callable[[str], bool] = lambda text: False
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
    if mode in _REQUIRED and not value_at(config, _REQUIRED[mode]):
        yield FieldError(_REQUIRED[mode], f"must be set in detectLocalMode {mode}")
    if mode == LocalMode.CLUSTER_CIDR and config.cluster_cidr:
        texts = cluster_cidrs(config)
        errors = list(_cidrs("clusterCIDR", texts))
        yield from (FieldError("clusterCIDR", each.reason) for each in errors)
        if not errors and len({family(parse_network(text)) for text in texts}) < len(texts):
            reason = f'"{config.cluster_cidr}" has more than one CIDR of the same family'
            yield FieldError("clusterCIDR", reason)


def cluster_cidrs(config: KubeProxyConfiguration) -> tuple[str, ...]:
    """Return clusterCIDR, split at the comma: one CIDR, or one of each family."""
    return tuple(text.strip() for text in config.cluster_cidr.split(","))


# The families of a configuration's addresses against those of the node (kube-proxy.md 15 and 17).
#
# The node's primary family is that of bindAddress or, if that is unspecified, of the Node's first
# address. Both families are served if the kernel has both.


class NodeFamilies(NamedTuple):
    """The node's primary family, the families that its kernel supports, and spec.podCIDRs."""

    primary: Family
    supported: frozenset[Family]
    pod_cidrs: tuple[Network, ...] = ()


def enforce_families(config: KubeProxyConfiguration, node: NodeFamilies) -> None:
    """Log every mismatch. Raises ConfigurationError if any of them is fatal."""
    mismatches = dict(check_families(config, node))
    for message, is_fatal in mismatches.items():
        if not is_fatal:
            log.warning("%s", message)
    fatal = [message for message, is_fatal in mismatches.items() if is_fatal]
    if fatal:
        raise ConfigurationError("the configuration does not fit the Node: " + "; ".join(fatal))


def check_families(
    config: KubeProxyConfiguration, node: NodeFamilies
) -> Iterator[tuple[str, bool]]:
    """Yield a message for each mismatch of a valid configuration, and whether it is fatal."""
    primary, is_single = node.primary, len(node.supported) < len(Family)
    if primary not in node.supported:
        text = f"the node's primary family is {primary}, which the kernel does not support"
        yield text, True
    lacks = f"the node is {primary}-{'only' if is_single else 'primary'}, but there is no {primary}"
    clusters = _networks(cluster_cidrs(config))
    mode = config.detect_local_mode
    if _lack(clusters, primary):
        yield f"clusterCIDR: {lacks} CIDR", mode == LocalMode.CLUSTER_CIDR and is_single
    if _lack(node.pod_cidrs, primary):
        yield f"the Node's podCIDRs: {lacks} CIDR", mode == LocalMode.NODE_CIDR
    chosen = config.node_port_addresses
    if chosen and not any(map(devices.is_word, chosen)):
        expected = {primary, *map(family, clusters), *map(family, node.pod_cidrs)}
        for missing in sorted(expected - set(map(family, _networks(chosen)))):
            yield (
                f"nodePortAddresses: there is no {missing} CIDR, so NodePorts are served on all"
                f" {missing} addresses",
                False,
            )


def _networks(texts: Iterable[str]) -> list[Network]:
    """Parse the networks; skip others: fields that the mode does not use are not validated."""
    networks = []
    for text in texts:
        with suppress(ValueError):
            networks.append(parse_network(text))
    return networks


def _lack(networks: Sequence[Network], primary: Family) -> bool:
    """Whether there are networks, but none of the primary family."""
    return bool(networks) and all(family(each) != primary for each in networks)
