# SPDX-License-Identifier: Apache-2.0
"""The EndpointSlices of a Service -> the endpoints of one service port (kube-proxy.md 2).

A Service has any number of slices: some for each family, more for pods that resolve a named target
port to another number, and those that people wrote by hand. They are merged by port name and
protocol. If two slices hold the same endpoint, one that is not terminating is used; of several
kube-proxy may use any. Here slices are read in the order of their names and the last such endpoint
is used, so that the order of events does not matter.

Before: endpoint_slices.py says what is stored of a slice.
Next: selection.py says which of the endpoints a service port uses.
"""

from collections.abc import Iterable
from operator import attrgetter

from msgspec import Struct

from ebpflb.model import endpoint_slices, weights
from ebpflb.model.addresses import Address, Family
from ebpflb.model.endpoint_slices import EndpointName, Hints, StoredEndpoint, StoredSlice
from ebpflb.model.services import PortName

_by_name = attrgetter("name")


class Endpoint(Struct, frozen=True, gc=False):
    """One address and port of a service port."""

    address: Address
    port: int
    ready: bool
    serving: bool
    terminating: bool
    local: bool
    name: EndpointName
    hints: Hints
    weight: int = weights.DEFAULT_WEIGHT


def merge(slices: Iterable[StoredSlice], name: PortName, node_name: str) -> tuple[Endpoint, ...]:
    """The endpoints of one service port, sorted by their "address:port" text.

    ``slices`` are all those of its Service, in any order.
    """
    found: dict[str, Endpoint] = {}
    for slice in sorted(slices, key=_by_name):
        if slice.family == name.family:
            for port in endpoint_slices.port_numbers(slice, name):
                for stored in slice.endpoints:
                    _add(found, stored, port, name.family, node_name, slice.weight)
    return tuple([found[key] for key in sorted(found)])


def _add(
    found: dict[str, Endpoint],
    stored: StoredEndpoint,
    port: int,
    family: Family,
    node_name: str,
    weight: int,
) -> None:
    address, (ready, serving, terminating) = stored.address, stored.conditions
    if address is None or isinstance(address, str):
        return
    key = f"{address}:{port}" if family == Family.IPV4 else f"[{address}]:{port}"
    if terminating and key in found:
        return
    name = stored.name
    local = name.node == node_name and node_name != ""
    conditions = ready, serving, terminating, local
    found[key] = Endpoint(address, port, *conditions, name, stored.hints, weight)
