# SPDX-License-Identifier: Apache-2.0
"""Which of the endpoints a service port uses, seen from one node (kube-proxy.md 3).

Traffic under a Cluster policy goes to the *cluster* list, under a Local policy to the *local*
list. Each list holds the ready endpoints, or else those that are terminating but still serve.
Both are selected whatever the policies are, so that a policy can change without the endpoints.
Topology hints apply to the cluster list only. If a list is empty, ``has_any`` says whether there
are endpoints elsewhere (drop) or none at all (refuse, kube-proxy.md 6.1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from ebpflb.model.endpoints import Endpoint
from ebpflb.model.services import ServicePort

_Endpoints = tuple[Endpoint, ...]
_Hints = Callable[[Endpoint], frozenset[str]]

_node_hints: _Hints = attrgetter("hints.nodes")
_zone_hints: _Hints = attrgetter("hints.zones")


@dataclass(frozen=True, slots=True)
class Topology:
    """Where this node is; ``zone`` is "" if it has no zone label."""

    node: str
    zone: str


@dataclass(frozen=True, slots=True)
class Selection:
    """Each list keeps the order of the endpoints it was selected from.

    ``serving`` holds every serving endpoint, under any policy: existing UDP flows may keep these
    (kube-proxy.md 11.1). ``has_any``: there are usable endpoints, here or elsewhere.
    """

    cluster: _Endpoints
    local: _Endpoints
    serving: _Endpoints
    has_any: bool


def select(endpoints: _Endpoints, topology: Topology) -> Selection:
    """kube-proxy.md 3; an endpoint is used if ready, even one that does not serve.

    One of weight 0, which kube-proxy does not know, is used for nothing new.
    """
    weighted = [endpoint for endpoint in endpoints if endpoint.weight]
    ready = tuple([endpoint for endpoint in weighted if endpoint.ready])
    terminating = tuple([each for each in weighted if each.serving and each.terminating])
    return Selection(
        cluster=_nearest(ready, topology) or terminating,
        local=_local(ready) or _local(terminating),
        serving=tuple([endpoint for endpoint in endpoints if endpoint.serving]),
        has_any=bool(ready or terminating),
    )


def uses_cluster(port: ServicePort) -> bool:
    """Even under ETP Local the node and its pods use the cluster list (kube-proxy.md 4.3)."""
    return port.externally_accessible or not port.internal_local


def uses_local(port: ServicePort) -> bool:
    """Whether a policy Local holds for some of its frontends."""
    return port.internal_local or (port.external_local and port.externally_accessible)


def hinted_by_node(ready: _Endpoints, topology: Topology) -> _Endpoints:
    """The ready endpoints whose hints name this node; empty where that mode is off."""
    return _hinted(ready, _node_hints, topology.node)


def _nearest(ready: _Endpoints, topology: Topology) -> _Endpoints:
    """The topology modes of kube-proxy.md 3.1, narrowest first; never empty unless ``ready`` is."""
    by_node = hinted_by_node(ready, topology)
    return by_node or _hinted(ready, _zone_hints, topology.zone) or ready


def _hinted(ready: _Endpoints, hints: _Hints, here: str) -> _Endpoints:
    """Empty when the mode is off: the node has no name or zone, or some endpoint has no hint."""
    if not here or not all(map(hints, ready)):
        return ()
    return tuple([endpoint for endpoint in ready if here in hints(endpoint)])


def _local(endpoints: _Endpoints) -> _Endpoints:
    return tuple([endpoint for endpoint in endpoints if endpoint.local])
