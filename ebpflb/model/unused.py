# SPDX-License-Identifier: Apache-2.0
"""Why an endpoint is not used, as values beside the selection.

Which endpoints are used is decided by ``endpoints.merge`` and ``selection.select`` alone. Here it
is only said which of their conditions an endpoint did not meet, from what they returned.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from ebpflb.model import endpoint_slices, selection
from ebpflb.model.endpoint_slices import StoredEndpoint, StoredSlice
from ebpflb.model.endpoints import Endpoint
from ebpflb.model.selection import Selection, Topology
from ebpflb.model.services import PortName, ServicePort


class UnusedReason(StrEnum):
    """In the words that the operator reads."""

    # Not selected.
    NOT_READY = "not ready"
    NOT_SERVING = "terminating, and serving no more"
    OTHERS_READY = "terminating, while others are ready"
    OTHER_NODES = "for other nodes, by its hints"
    OTHER_ZONES = "for other zones, by its hints"
    NOT_LOCAL = "on another node, under policy Local"
    # No endpoint of a service port.
    ADDRESS_TYPE = "its slice has neither IPv4 nor IPv6 addresses"
    OTHER_FAMILY = "the service has no cluster IP of its family"
    NO_ADDRESS = "its first address is missing or invalid"
    NO_SUCH_PORT = "its slice has no such port"
    NO_WEIGHT = "its slice has the weight 0"
    # Selected, but not in the maps.
    CLAIMED = "every address is claimed by an older service"
    NO_SPACE = "no space"
    NOT_WRITTEN = "not written yet"
    GONE = "in no slice any more, not written yet"


class Use(NamedTuple):
    """Why an endpoint is not in a list; None where it is, or where no policy uses that list."""

    endpoint: Endpoint
    not_in_cluster: UnusedReason | None
    not_in_local: UnusedReason | None


class LeftOut(NamedTuple):
    """An entry of a slice that is no endpoint of a service port; of none where it is None."""

    port: PortName | None
    slice: str
    endpoint: StoredEndpoint
    reason: UnusedReason


def uses(
    port: ServicePort, found: tuple[Endpoint, ...], selected: Selection, topology: Topology
) -> list[Use]:
    """For each endpoint of a service port, in order; ``selected`` is what was selected of them."""
    cluster, local = set(map(id, selected.cluster)), set(map(id, selected.local))
    uses_cluster, uses_local = selection.uses_cluster(port), selection.uses_local(port)
    ready = tuple([endpoint for endpoint in found if endpoint.ready and endpoint.weight])
    hints = UnusedReason.OTHER_ZONES
    if selection.hinted_by_node(ready, topology):
        hints = UnusedReason.OTHER_NODES
    return [
        Use(
            each,
            _not_in_cluster(each, hints) if uses_cluster and id(each) not in cluster else None,
            _not_in_local(each) if uses_local and id(each) not in local else None,
        )
        for each in found
    ]


def chosen(port: ServicePort, selected: Selection) -> set[int]:
    """The ids of the objects of those that some policy of the service port may choose."""
    lists = (
        selected.cluster if selection.uses_cluster(port) else (),
        selected.local if selection.uses_local(port) else (),
    )
    return {id(each) for found in lists for each in found}


def left_out(slices: Iterable[StoredSlice], ports: Iterable[ServicePort]) -> Iterator[LeftOut]:
    """The entries of a Service's slices that are no endpoints of some of its service ports."""
    ports = tuple(ports)
    for slice in slices:
        for endpoint in slice.endpoints:
            for port, reason in _reasons(slice, endpoint, ports):
                yield LeftOut(port, slice.name, endpoint, reason)


def _reasons(
    slice: StoredSlice, endpoint: StoredEndpoint, ports: tuple[ServicePort, ...]
) -> Iterator[tuple[PortName | None, UnusedReason]]:
    of_family = [port.name for port in ports if port.name.family == slice.family]
    if slice.family is None:
        yield None, UnusedReason.ADDRESS_TYPE
    elif not of_family:
        yield None, UnusedReason.OTHER_FAMILY
    elif endpoint.address is None or isinstance(endpoint.address, str):
        yield None, UnusedReason.NO_ADDRESS
    else:
        for name in of_family:
            if not any(endpoint_slices.port_numbers(slice, name)):
                yield name, UnusedReason.NO_SUCH_PORT


def _not_in_cluster(endpoint: Endpoint, hints: UnusedReason) -> UnusedReason:
    if not endpoint.weight:
        return UnusedReason.NO_WEIGHT
    return hints if endpoint.ready else _not_ready(endpoint)


def _not_in_local(endpoint: Endpoint) -> UnusedReason:
    if not endpoint.weight:
        return UnusedReason.NO_WEIGHT
    usable = endpoint.ready or (endpoint.serving and endpoint.terminating)
    return UnusedReason.NOT_LOCAL if usable and not endpoint.local else _not_ready(endpoint)


def _not_ready(endpoint: Endpoint) -> UnusedReason:
    if not endpoint.terminating:
        return UnusedReason.NOT_READY
    return UnusedReason.OTHERS_READY if endpoint.serving else UnusedReason.NOT_SERVING
