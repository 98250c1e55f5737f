# SPDX-License-Identifier: Apache-2.0
"""Whether the state of the cluster is what its objects say, as they have been listed anew."""

from collections.abc import Mapping, Set
from typing import Any

from ebpflb.errors import InvalidObject
from ebpflb.model import endpoint_slices, nodes, services
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoint_slices import ReadSlice
from ebpflb.model.events import Key, Kind, ReadObject
from ebpflb.model.objects import EndpointSlice, Node, Service, ServiceCIDR

_NOT_KNOWN = "is not known to the agent"
_KNOWN_OTHERWISE = "is known to the agent as it is not"
GONE = "is known to the agent and not there any more"


def known(cluster: ClusterState, kind: Kind) -> Set[Key]:
    """The objects of a kind that must be in a list of all; a Node that is deleted stays."""
    return _stored(cluster).get(kind, {}).keys()


def difference(cluster: ClusterState, kind: Kind, key: Key, found: ReadObject) -> str:
    """In which way the state differs from an object; "": not at all, or the object is invalid."""
    try:
        wanted = _wanted(cluster, found)
    except InvalidObject:
        return ""
    stored = cluster.node if kind is Kind.NODE else _stored(cluster)[kind].get(key)
    if stored == wanted:
        return ""
    return _KNOWN_OTHERWISE if stored is not None else _NOT_KNOWN


def _stored(cluster: ClusterState) -> dict[Kind, Mapping[Key, Any]]:
    return {
        Kind.SERVICE: cluster.services,
        Kind.ENDPOINT_SLICE: cluster.slices,
        Kind.SERVICE_CIDR: cluster.ranges,
    }


def _wanted(cluster: ClusterState, found: ReadObject) -> Any:
    """What ``ClusterState.apply`` stores of an object. Raises InvalidObject."""
    match found.object:
        case Service() as service:
            return services.parse(service, cluster.admission).ports
        case EndpointSlice() as slice:
            return endpoint_slices.read(slice).stored
        case ReadSlice() as read:
            return read.stored
        case ServiceCIDR() as cidr:
            return nodes.read_service_cidrs(cidr)
        case Node() as node:
            return node
        case InvalidObject() as error:
            raise InvalidObject(error.field, error.reason)
