# SPDX-License-Identifier: Apache-2.0
"""Requests that are handed to another node by its MAC address (--hand-over): to which nodes.

With externalTrafficPolicy Local a request is handed over if this node has no ready endpoint. With
policy Cluster and ``ebpflb.io/forwarding: keep-client`` each node gets its share, this one too, and
translates its share to its own endpoints only; so it is in force here only while all nodes that
have endpoints can be handed to, and otherwise requests are masqueraded as without it.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from ipaddress import ip_network
from typing import NamedTuple

from ebpflb.model.addresses import Address, Network
from ebpflb.model.devices import Device
from ebpflb.model.endpoint_slices import StoredSlice
from ebpflb.model.endpoints import Selection, without_set_aside
from ebpflb.model.services import Protocol, ServicePort


class Hop(NamedTuple):
    """A node that packets may be handed to, in one family.

    ``address``: the node's, on the segment of the uplink ``device``, which is this node's; ``mac``:
    the other node's MAC address there, 6 bytes.
    """

    node: str
    address: Address
    device: Device
    mac: bytes


class Hops(NamedTuple):
    """The other nodes on the uplinks' segments.

    ``believed``: both legs of a hand-over have passed lately; sorted. ``macs``: of all other nodes
    that are known, also untested ones: frames from them are never handed on. ``blocked``: node ->
    why nothing is handed to it, a sentence. ``uplinks``: where other nodes' tests are answered.
    """

    believed: tuple[Hop, ...] = ()
    macs: frozenset[bytes] = frozenset()
    blocked: Mapping[str, str] = {}
    uplinks: tuple[Device, ...] = ()


class Hosts:
    """The addresses of nodes and of their pods. Nothing is handed over there, whoever claims one:
    answers to their own connections come there, too.
    """

    def __init__(self, its: Iterable[Address | Network]) -> None:
        self._found = defaultdict[tuple[int, int], set[int]](set)  # by version and bits behind
        for each in map(ip_network, its):
            behind = each.max_prefixlen - each.prefixlen
            self._found[each.version, behind].add(int(each.network_address) >> behind)

    def __contains__(self, address: Address) -> bool:
        version, value = address.version, int(address)
        found = self._found.items()
        return any(value >> behind in its for (of, behind), its in found if of == version)


# Which nodes get a service port's requests.

Weights = Mapping[str, int]
"""Nodes with their weights: the sum of those of their endpoints."""


def handed_to(
    port: ServicePort, selection: Selection, own: str, believed: Container[object]
) -> Weights | None:
    """Return the nodes among which requests to external addresses are spread; None: as ever.

    ``port``: one that ``hands_over``; ``own``: this node; ``believed``: others that may be handed
    to, with their families. Empty: only flows that have a node already are handed over, all others
    are treated as ever.
    """
    if port.name.protocol == Protocol.SCTP:
        return None
    ready = tuple([each for each in selection.listed if each.ready and each.weight])
    leaving = (each for each in selection.listed if each.serving and each.terminating)
    weights = Counter[str]()
    for each in without_set_aside(ready) or [each for each in leaving if each.weight]:
        weights[own if each.local else each.name.node] += each.weight
    if port.external_local and own in weights:
        return {own: 1}
    family = port.name.family
    reached = {at: it for at, it in weights.items() if at == own or (family, at) in believed}
    if not port.external_local and reached.keys() != weights.keys():
        return {}
    return reached


def keeps_here(port: ServicePort, nodes: Weights | None, own: str) -> bool:
    """Whether requests that reach this node go to its own endpoints, in spite of policy Cluster."""
    return nodes is not None and own in nodes and not port.external_local


_MOST_NAMED = 3  # nodes in a sentence
COMES_IN = "a packet that comes in here"


def says(
    port: ServicePort, weights: Weights | None, own: str, slices: Iterable[StoredSlice]
) -> str:
    """Return a sentence about a packet that comes in here; "" if it is treated as ever."""
    if weights is None or [*weights] == [own]:
        return ""
    if not weights:
        return f"{COMES_IN} is not handed to another node: `ebpflb status` says why"
    counts = Counter(
        each.name.node
        for slice in slices
        if slice.family is port.name.family
        for each in slice.endpoints
        if each.conditions.ready
    )
    parts = [
        f"{'stays here, with' if node == own else f'is handed to {node}, which has'}"
        f" {counts[node]} of {counts.total()} endpoints"
        for node in [*weights][:_MOST_NAMED]
    ]
    parts += [f"is handed to one of {len(weights) - _MOST_NAMED} others"] * (
        len(weights) > _MOST_NAMED
    )
    return f"{COMES_IN} {', or '.join(parts)}"
