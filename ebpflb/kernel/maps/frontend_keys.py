# SPDX-License-Identifier: Apache-2.0
"""Which addresses and ports are frontends, for questions about very many connections.

The map's keys are read once and not unpacked: 65,536 of them take 0.1 s.
"""

import struct
from collections.abc import Mapping
from functools import cached_property
from ipaddress import ip_address

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import MAPPED, MAPS, ffi
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Frontend

_AT = {name: ffi.offsetof("struct frontend", name) for name in ("address", "port", "protocol")}
_SIZE = MAPS["services"].key_size
_KEY = struct.Struct(f">16sHB{_SIZE - _AT['protocol'] - 1}x")
assert _AT == {"address": 0, "port": 16, "protocol": 18}, "struct frontend is read in this order"
_ANY = {4: bytes(4), 16: bytes(16)}  # a NodePort's address, by the length of a packed one


class FrontendKeys:
    """The frontends at the time of the first use."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._maps = maps

    def __call__(self, protocol: int, address: bytes, port: int) -> bool:
        """Whether this is a frontend: of a service, or a NodePort at an address of the node.

        ``address`` is packed, in 4 or 16 bytes.
        """
        if (protocol, address, port) in self._keys:
            return True
        nodeport = protocol, _ANY[len(address)], port
        return nodeport in self._keys and address in self._node_addresses

    def frontend(self, protocol: Protocol, address: Address, port: int) -> Frontend:
        """Return the frontend of this destination, which is one; a NodePort has no address."""
        if (protocol, address.packed, port) in self._keys:
            return Frontend(address, port, protocol)
        return Frontend(ip_address(_ANY[len(address.packed)]), port, protocol)

    @cached_property
    def _keys(self) -> set[tuple[int, bytes, int]]:
        return {
            (protocol, _short(address), port)
            for keys, _ in self._maps["services"].slices()
            for address, port, protocol in _KEY.iter_unpack(keys)
        }

    @cached_property
    def _node_addresses(self) -> set[bytes]:
        return {address.packed for address, _ in self._maps["node_addresses"].items()}


def _short(address: bytes) -> bytes:
    """Return an IPv4 address in four bytes; the maps hold it as v4-mapped IPv6."""
    return address[len(MAPPED) :] if address.startswith(MAPPED) else address
