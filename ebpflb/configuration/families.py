# SPDX-License-Identifier: Apache-2.0
"""Addresses that do not fit: a configuration against this node's families (kube-proxy.md 15, 17).

The primary family is that of bindAddress, else of the Node's first address: without the former it
is not known before the Node is. Both families are served where the kernel has both.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ebpflb.configuration import addresses
from ebpflb.configuration.fields import KubeProxyConfiguration
from ebpflb.configuration.validation import cluster_cidrs
from ebpflb.errors import ConfigurationError
from ebpflb.model import nodeports
from ebpflb.model.addresses import Family, Network, family, parse_network
from ebpflb.model.locality import Mode

log = logging.getLogger(__name__)


class Mismatch(NamedTuple):
    """One line for the operator; where it is ``fatal`` nothing can be served."""

    text: str
    fatal: bool = False


class Place(NamedTuple):
    """This node: its primary family, what the kernel can, and spec.podCIDRs."""

    primary: Family
    supported: frozenset[Family]
    pod_cidrs: tuple[Network, ...] = ()

    @property
    def is_single(self) -> bool:
        return len(self.supported) < len(Family)

    def __str__(self) -> str:
        return f"the node is {self.primary}-{'only' if self.is_single else 'primary'}"


def enforce(found: KubeProxyConfiguration, place: Place) -> None:
    """Logs what does not fit. Raises ConfigurationError where nothing could be served with it."""
    mismatches = list(check(found, place))
    for each in mismatches:
        if not each.fatal:
            log.warning("%s", each.text)
    fatal = [each.text for each in mismatches if each.fatal]
    if fatal:
        raise ConfigurationError("the configuration does not fit the Node: " + "; ".join(fatal))


def check(found: KubeProxyConfiguration, place: Place) -> Iterator[Mismatch]:
    """Takes for granted that the configuration is valid."""
    if place.primary not in place.supported:
        yield Mismatch(f"the node's primary family is {place.primary}: the kernel lacks it", True)
    clusters = _networks(cluster_cidrs(found) if found.cluster_cidr else ())
    if _only_other(clusters, place.primary):
        fatal = found.detect_local_mode == Mode.CLUSTER_CIDR and place.is_single
        yield Mismatch(f"clusterCIDR: {place}, but there is no {place.primary} CIDR", fatal)
    if _only_other(place.pod_cidrs, place.primary):
        fatal = found.detect_local_mode == Mode.NODE_CIDR
        yield Mismatch(f"the Node's podCIDRs: {place}, but there is no {place.primary} one", fatal)
    yield from _nodeport_addresses(found, place, [*clusters, *place.pod_cidrs])
    if place.is_single:
        yield from _single(found, place)


def _nodeport_addresses(
    found: KubeProxyConfiguration, place: Place, others: Sequence[Network]
) -> Iterator[Mismatch]:
    """A family that is not named accepts NodePorts on all of its addresses (kube-proxy.md 8)."""
    if found.node_port_addresses in ((), nodeports.PRIMARY):
        return
    named = {family(each) for each in _networks(found.node_port_addresses)}
    expected = {place.primary} | ({family(each) for each in others} if others else set())
    for missing in sorted(expected - named):
        yield Mismatch(
            f"nodePortAddresses: there is no {missing} CIDR, so NodePorts are served on all"
            f" {missing} addresses"
        )


def _single(found: KubeProxyConfiguration, place: Place) -> Iterator[Mismatch]:
    if _only_other(_networks(found.ipvs.exclude_cidrs), place.primary):
        yield Mismatch(f"ipvs.excludeCIDRs: {place}, but there is no {place.primary} CIDR")
    for path, text in (
        ("healthzBindAddress", found.healthz_bind_address),
        ("metricsBindAddress", found.metrics_bind_address),
    ):
        host = addresses.parse(text)[0] if text else None
        if host and not host.is_unspecified and family(host) != place.primary:
            yield Mismatch(f"{path}: {place}, but {host} is {family(host)}")


def _networks(texts: Iterable[str]) -> list[Network]:
    """Where the mode does not go by them they may be anything: what is no CIDR is passed over."""
    found = []
    for text in texts:
        with suppress(ValueError):
            found.append(parse_network(text))
    return found


def _only_other(networks: Sequence[Network], primary: Family) -> bool:
    return bool(networks) and all(family(each) != primary for each in networks)
