# SPDX-License-Identifier: Apache-2.0
"""The canary: service ports of `ebpflb doctor`'s own, which lead to an endpoint of its own.

They are in the desired state like all others, under a namespace that the API gives to none, and
count as the youngest: every Service gets before them what both claim. Each frontend is restricted,
so that the node and the canary's client alone are served. For the same reason the sockets of the
client, which is in another network namespace, are left to the packet path (select_admission).
"""

from collections.abc import Callable, Collection, Iterable
from ipaddress import ip_network
from typing import NamedTuple

import msgspec

from ebpflb.model.addresses import Address, Network, family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.desired import ANY, DesiredBackend, DesiredService
from ebpflb.plan.entries import BackendName, Frontend

NAMESPACE, NAME = "ebpflb_doctor", "canary"  # a "_" is in no name of the API
CANARY_PROTOCOLS = (Protocol.TCP, Protocol.UDP)
_YOUNGEST = "~"  # sorts after every creationTimestamp
_CLUSTER_IP = frozenset({"endpoints", "restricted"})
_NODEPORT = frozenset({"endpoints", "restricted", "external", "nodeport"})
_BACKEND = frozenset({"cluster", "here"})
_NEAR = 8  # bits: how far from one that a Service has
_DRAWS = 200  # until no address is taken for unused


class Canary(NamedTuple):
    """In one family. ``node``: what the node's own sockets are admitted as (map settings)."""

    cluster_ip: Address
    client: Address
    endpoint: Address
    node: Address
    port: int  # of the endpoint and the cluster IP
    nodeport: int


class CanaryLease(msgspec.Struct):
    """What the agent answers: the canary is in the maps until it is ended, or not renewed.

    ``cluster_ips``: one of each family that has any. ``devices``: --devices, "" for all.
    """

    id: str
    cluster_ips: list[str]
    devices: str = ""


def is_canary(name: PortName) -> bool:
    return name.namespace == NAMESPACE


def service_ports(canary: Canary) -> dict[PortName, DesiredService]:
    """What the maps should hold for it."""
    return {desired.name: desired for desired in (_port(canary, it) for it in CANARY_PROTOCOLS)}


def _port(canary: Canary, protocol: Protocol) -> DesiredService:
    of = family(canary.cluster_ip)
    return DesiredService(
        name=PortName(NAMESPACE, NAME, protocol.name.lower(), protocol, of),
        created=_YOUNGEST,
        frontends={
            Frontend(canary.cluster_ip, canary.port, protocol): _CLUSTER_IP,
            Frontend(ANY[of], canary.nodeport, protocol): _NODEPORT,
        },
        affinity_seconds=0,
        backends=(
            DesiredBackend(canary.endpoint, canary.port, _BACKEND, BackendName("", NAMESPACE)),
        ),
        source_ranges=tuple(map(ip_network, (canary.client, canary.node))),
        nodeport_source_ranges=(ip_network(canary.client),),
    )


def unused_cluster_ip(
    ranges: Iterable[Network],
    covering: Network | None,
    cluster_ips: Iterable[Address],
    taken: Collection[Address],
    draw: Callable[[int], int],
) -> Address | None:
    """One that no Service has, all of one family; None where none can be told from others'.

    It is in ``covering``, which holds every cluster IP and range that is known and so need not
    grow. Where no range is known it is near a cluster IP: the covering prefix of two distant ones
    holds addresses of others. ``draw`` gives a number below the one that it gets.
    """
    if covering is None:
        return None
    places = [each for each in ranges if each.version == covering.version]
    places = places or [_near(each, covering) for each in cluster_ips if each in covering]
    for _ in range(_DRAWS if places else 0):
        place = places[draw(len(places))]
        found = place[draw(place.num_addresses)]
        ends = place.network_address, place.broadcast_address
        if found in covering and found not in ends and found not in taken:
            return found
    return None


def _near(address: Address, covering: Network) -> Network:
    length = max(covering.prefixlen, covering.max_prefixlen - _NEAR)
    return ip_network((address, length), strict=False)
