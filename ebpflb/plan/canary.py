# SPDX-License-Identifier: Apache-2.0
"""The canary: service ports that `ebpflb doctor` adds, with an endpoint that doctor runs itself.

The canary is part of the desired state like any Service, under a namespace name that the API
rejects. Its service ports count as the youngest, so a Service that claims the same address wins.
Each frontend is restricted: only the node and the canary's client are served. Therefore sockets of
the client, which runs in another network namespace, use the packet path (select_admission).
"""

from collections.abc import Callable, Collection, Iterable
from ipaddress import ip_address, ip_network
from typing import NamedTuple

import msgspec

from ebpflb.entries.services import BackendName, Frontend
from ebpflb.model.addresses import Address, Family, Network, family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.desired import ANY, DesiredBackend, DesiredService

NAMESPACE, NAME = "ebpflb_doctor", "canary"  # the API allows no "_" in a name
CANARY_PROTOCOLS = (Protocol.TCP, Protocol.UDP)
_YOUNGEST = "~"  # sorts after every creationTimestamp
_CLUSTER_IP = frozenset({"endpoints", "restricted"})
_NODEPORT = frozenset({"endpoints", "restricted", "external", "nodeport"})
_FRAMES = frozenset({"endpoints", "external"})
_BACKEND = frozenset({"cluster", "here"})
_NEAR = 8  # bits: how far a new address may be from an existing cluster IP
_DRAWS = 200  # attempts to find an unused address


class Canary(NamedTuple):
    """The canary's addresses in one family.

    ``node`` is the address that the node's own sockets have in source ranges (map settings).
    """

    cluster_ip: Address
    client: Address
    endpoint: Address
    node: Address
    port: int  # of the endpoint and the cluster IP
    nodeport: int


class CanaryLease(msgspec.Struct):
    """The agent's answer.

    The canary stays in the maps until the lease is ended or not renewed in time. ``cluster_ips``
    has one address for each family in use. ``devices`` is --devices, "" for all.
    """

    id: str
    cluster_ips: list[str]
    devices: str = ""


class UplinkReport(msgspec.Struct):
    """The agent's answer: device -> what is wrong there with requests that come in, "" if nothing.

    ``lost``: the devices where requests are not translated; of others it may not be known.
    """

    uplinks: dict[str, str]
    lost: list[str] = []


def is_canary(name: PortName) -> bool:
    return name.namespace == NAMESPACE


def service_ports(canary: Canary) -> dict[PortName, DesiredService]:
    """Return the desired state of the canary's service ports."""
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


# The canary of the agent itself: frames to these addresses, which no host has (RFC 7600, RFC 6666),
# are put into each uplink's ingress. The program there chooses a backend that does not exist, and
# the frames end before they are translated (kernel/netfilter/arrivals.py).
FRAMES_TO = {Family.IPV4: ip_address("192.0.0.8"), Family.IPV6: ip_address("100::eb")}
FRAME_PORT = 9  # discard


def frame_ports() -> dict[PortName, DesiredService]:
    """Return the desired state of the service ports for frames."""
    return {desired.name: desired for desired in map(_frame_port, FRAMES_TO)}


def _frame_port(of: Family) -> DesiredService:
    to = FRAMES_TO[of]
    return DesiredService(
        name=PortName(NAMESPACE, "uplinks", "", Protocol.UDP, of),
        created=_YOUNGEST,
        frontends={Frontend(to, FRAME_PORT, Protocol.UDP): _FRAMES},
        affinity_seconds=0,
        backends=(DesiredBackend(to, FRAME_PORT, _BACKEND, BackendName("", NAMESPACE)),),
    )


def unused_cluster_ip(
    ranges: Iterable[Network],
    covering: Network | None,
    cluster_ips: Iterable[Address],
    taken: Collection[Address],
    draw: Callable[[int], int],
) -> Address | None:
    """Return a cluster IP that no Service has, of one family, or None if no safe address is known.

    The address is inside ``covering``, which holds every known cluster IP and range, so
    ``covering`` need not grow. If no range is known the address is near an existing cluster IP,
    because the covering prefix of two distant cluster IPs also holds other addresses. ``draw``
    returns a random number below its argument.
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
