# SPDX-License-Identifier: Apache-2.0
"""Check the IP families of a configuration's addresses against those of the node.

See kube-proxy.md 15 and 17. The node's primary family is that of bindAddress or, if that is
unspecified, of the Node's first address; so this check has to wait for the Node. Both families are
served if the kernel has both.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ebpflb.config.fields import KubeProxyConfiguration, value_at
from ebpflb.config.listen_addresses import LISTEN_FIELDS, parse_listen_address
from ebpflb.config.validation import cluster_cidrs
from ebpflb.errors import ConfigurationError
from ebpflb.model import devices
from ebpflb.model.addresses import Family, Network, family, parse_network
from ebpflb.model.devices import LocalMode

log = logging.getLogger(__name__)


class FamilyMismatch(NamedTuple):
    """A message for the operator; ``fatal`` if the node cannot serve with this configuration."""

    message: str
    fatal: bool = False


class NodeFamilies(NamedTuple):
    """The node's primary family, the families that its kernel supports, and spec.podCIDRs."""

    primary: Family
    supported: frozenset[Family]
    pod_cidrs: tuple[Network, ...] = ()

    @property
    def is_single(self) -> bool:
        return len(self.supported) < len(Family)

    def __str__(self) -> str:
        return f"the node is {self.primary}-{'only' if self.is_single else 'primary'}"


def enforce_families(config: KubeProxyConfiguration, node: NodeFamilies) -> None:
    """Log every mismatch. Raises ConfigurationError if any of them is fatal."""
    mismatches = list(check_families(config, node))
    for each in mismatches:
        if not each.fatal:
            log.warning("%s", each.message)
    fatal = [each.message for each in mismatches if each.fatal]
    if fatal:
        raise ConfigurationError("the configuration does not fit the Node: " + "; ".join(fatal))


def check_families(config: KubeProxyConfiguration, node: NodeFamilies) -> Iterator[FamilyMismatch]:
    """Yield all mismatches of a valid configuration."""
    primary = node.primary
    if primary not in node.supported:
        yield FamilyMismatch(
            f"the node's primary family is {primary}, which the kernel does not support", True
        )
    clusters = _networks(cluster_cidrs(config) if config.cluster_cidr else ())
    if _lack(clusters, primary):
        fatal = config.detect_local_mode == LocalMode.CLUSTER_CIDR and node.is_single
        yield FamilyMismatch(f"clusterCIDR: {node}, but there is no {primary} CIDR", fatal)
    if _lack(node.pod_cidrs, primary):
        fatal = config.detect_local_mode == LocalMode.NODE_CIDR
        yield FamilyMismatch(f"the Node's podCIDRs: {node}, but there is no {primary} CIDR", fatal)
    yield from _nodeport_addresses(config, primary, [*clusters, *node.pod_cidrs])
    if node.is_single:
        yield from _single_stack(config, node)


def _nodeport_addresses(
    config: KubeProxyConfiguration, primary: Family, pod_networks: Sequence[Network]
) -> Iterator[FamilyMismatch]:
    """Yield families without a CIDR; their NodePorts are served on all addresses.

    See kube-proxy.md 8.
    """
    if not config.node_port_addresses or any(map(devices.is_word, config.node_port_addresses)):
        return
    configured = {family(each) for each in _networks(config.node_port_addresses)}
    expected = {primary} | {family(each) for each in pod_networks}
    for missing in sorted(expected - configured):
        yield FamilyMismatch(
            f"nodePortAddresses: there is no {missing} CIDR, so NodePorts are served on all"
            f" {missing} addresses"
        )


def _single_stack(config: KubeProxyConfiguration, node: NodeFamilies) -> Iterator[FamilyMismatch]:
    if _lack(_networks(config.ipvs.exclude_cidrs), node.primary):
        yield FamilyMismatch(f"ipvs.excludeCIDRs: {node}, but there is no {node.primary} CIDR")
    for path in LISTEN_FIELDS:
        text = value_at(config, path)
        host = parse_listen_address(text)[0] if text else None
        if host and not host.is_unspecified and family(host) != node.primary:
            yield FamilyMismatch(f"{path}: {node}, but {host} is {family(host)}")


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
