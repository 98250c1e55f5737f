# SPDX-License-Identifier: Apache-2.0
"""Requests that are handed to another node by its MAC address (--hand-over): to which nodes."""

from collections.abc import Mapping
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device


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
    why nothing is handed to it, a sentence.
    """

    believed: tuple[Hop, ...] = ()
    macs: frozenset[bytes] = frozenset()
    blocked: Mapping[str, str] = {}
