# SPDX-License-Identifier: Apache-2.0
"""The UDP endpoints that were removed a moment ago: egress reports the datagrams to them.

The map is bpf/path/stale_endpoint.h's. Egress reads it only while the gate says that it is not
empty.
"""

import sys
from collections.abc import Iterable, Mapping
from itertools import islice

from ebpflb.kernel.maps.bpf_map import Map, MappedArray
from ebpflb.kernel.maps.layout import ffi
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Frontend

Endpoint = tuple[Address, int]

MOST_REPORTS = 4096  # of each endpoint: 0.2 s of CPU, even if it rightly gets more datagrams
_GATE = ffi.offsetof("struct flow_gate", "stale_endpoints")


class StaleEndpoints:
    """What the map holds. What a former agent has left in it is removed."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        """Raises KernelError."""
        gate = maps["flow_gate"]
        assert isinstance(gate, MappedArray)
        self._map, self._gate = maps["stale_endpoints"], gate
        self._keys: set[Frontend] = {key for key, _ in self._map.items()}
        self.keep(())

    def add(self, endpoints: Iterable[Endpoint]) -> None:
        """Have datagrams to these reported too, as far as the map has room. Raises KernelError."""
        added = list(islice(_keys(endpoints), self._map.spec.entries - len(self._keys)))
        self._map.write([(key, MOST_REPORTS) for key in added])
        self._set(self._keys.union(added))

    def keep(self, endpoints: Iterable[Endpoint]) -> None:
        """Have datagrams to all others not reported any more. Raises KernelError."""
        kept = self._keys & _keys(endpoints)
        self._map.delete(list(self._keys - kept))
        self._set(kept)

    def _set(self, keys: set[Frontend]) -> None:
        self._keys = keys
        self._gate.memory[_GATE : _GATE + 8] = len(keys).to_bytes(8, sys.byteorder)


def _keys(endpoints: Iterable[Endpoint]) -> set[Frontend]:
    return {Frontend(address, port, Protocol.UDP) for address, port in endpoints}
