# SPDX-License-Identifier: Apache-2.0
"""The hosts on this node's links: where --fast-forward finds the pods of this node."""

from typing import NamedTuple

from msgspec import Struct

from ebpflb.model.addresses import Address


class Neighbour(NamedTuple):
    """A host that the kernel reaches on the link of a device, without a gateway.

    ``mtu`` is the route's; 0 means the device's.
    """

    address: Address
    ifindex: int
    mac: str
    mtu: int = 0


class LearnedPort(NamedTuple):
    """The port of a bridge behind which a MAC address is. Both are indexes of devices."""

    bridge: int
    mac: str
    port: int


class Neighbourhood(Struct, frozen=True):
    """All neighbours of this network namespace, and the forwarding entries of its bridges."""

    neighbours: frozenset[Neighbour] = frozenset()
    ports: frozenset[LearnedPort] = frozenset()
