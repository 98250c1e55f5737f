# SPDX-License-Identifier: Apache-2.0
"""The maps' content at start, without entries that no agent can have written.

Memory, another program or an operator may have damaged an entry. A number beyond the size of its
map would end the agent's start, or make a program read beyond the map. Such an entry is removed and
logged, and the first plan writes the missing entries. A slot cannot be removed: its block counts as
empty.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Set
from ipaddress import IPv6Address
from typing import Any

from ebpflb.entries.services import (
    NO_SLOT,
    WHOLE,
    Backend,
    BackendName,
    Frontend,
    Range,
    ServiceEntry,
)
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.bpf_map import Map, MappedArray
from ebpflb.kernel.maps.layout import columns
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.map_contents import UNKNOWN_NAME, MapContents, read_back

log = logging.getLogger(__name__)

_NO_BACKEND = Backend(IPv6Address(0), 0, frozenset(), 0, 0)  # of no service: ids begin at 1
_OWNER, _NOBODY = columns("struct backend", id="I", service="H"), (0, 0)
_PROTOCOLS, _FAMILIES = frozenset(Protocol), frozenset(Family)
_SOURCE_RANGE_BITS = 32 + 32 + 128


class ValidContents:
    """The valid content of the maps. Other entries are logged, and removed if ``repair``."""

    def __init__(self, maps: Mapping[str, Map], capacity: Capacity, *, repair: bool) -> None:
        self._maps, self._capacity, self._repair = maps, capacity, repair
        self._is_valid: dict[str, Callable[[Any, Any], bool]] = {
            "services": self._is_service,
            "service_names": self._is_service_name,
            "backend_names": lambda id, _: 0 < id < capacity.backend_ids,
            "source_ranges": lambda key, _: (
                key.length <= _SOURCE_RANGE_BITS and 0 < key.service < capacity.service_ids
            ),
        }

    def items(self, name: str) -> Iterator[tuple[Any, Any]]:
        """Yield the entries of a hash."""
        is_valid = self._is_valid.get(name, _any)
        return valid_items(self._maps[name], is_valid, repair=self._repair)

    def backend_names(self) -> Mapping[int, BackendName]:
        """Return the names; each is read when it is asked for."""
        names = self._maps["backend_names"]
        is_valid = self._is_valid[names.spec.name]
        found = valid_items(names, is_valid, repair=self._repair, unpack=bytes)
        return BackendNames(names, {id for id, _ in found})

    def slots(self, block: Range) -> list[Backend]:
        found: list[Backend] = self._maps["slots"].get_range(*block)
        ids = self._capacity.backend_ids
        return [each if 0 < each.id < ids else _NO_BACKEND for each in found]

    def read_back(self) -> MapContents:
        """Return the content for the planner."""
        services, names = list(self.items("services")), dict(self.items("service_names"))
        backend_slots = self._backend_slots()
        ends = [sum(entry.block) for _, entry in services]
        ends += [slot + 1 for slot in backend_slots if slot != NO_SLOT]
        slots = _Slots(self._maps["slots"], max(ends, default=0), self._capacity.backend_ids)
        return read_back(
            services,
            slots,
            backend_slots.__getitem__,
            names,
            self.backend_names(),
            [key for key, _ in self.items("source_ranges")],
            [key for key, _ in self.items("cluster_ips")],
        )

    def _backend_slots(self) -> list[int]:
        found: list[int] = self._maps["backend_slots"].get_range(0, self._capacity.backend_ids)
        return [slot if slot < self._capacity.slots else NO_SLOT for slot in found]

    def _is_service(self, frontend: Frontend, entry: ServiceEntry) -> bool:
        lists = (entry.cluster, entry.local)
        return (
            (frontend.protocol in _PROTOCOLS or frontend[1:] == (0, WHOLE))
            and 0 < entry.id < self._capacity.service_ids
            and self._fits(entry.block)
            and sum(entry.tables) <= self._capacity.choices
            and all(not part.size or self._fits(part) for part in lists)
        )

    def _is_service_name(self, id: int, name: PortName) -> bool:
        known = name.protocol in _PROTOCOLS and name.family in _FAMILIES
        return known and 0 < id < self._capacity.service_ids

    def _fits(self, part: Range) -> bool:
        return part.base + part.size <= self._capacity.slots


class _Slots:
    """The slots before ``end``, as they were at the start; one with a wrong check is zero."""

    def __init__(self, slots: Map, end: int, backend_ids: int) -> None:
        assert isinstance(slots, MappedArray)
        self._packed = b"".join(slots.packed_range(0, end))
        self._size, self._unpack, self._ids = slots.size, slots.value.unpack, backend_ids

    def owners(self, block: Range) -> list[tuple[int, int]]:
        found = _OWNER.iter_unpack(self._of(block))
        return [(id, service) if 0 < id < self._ids else _NOBODY for id, service in found]

    def read(self, block: Range) -> list[Backend]:
        packed = self._of(block)
        return [
            self._unpack(packed[at : at + self._size]) for at in range(0, len(packed), self._size)
        ]

    def _of(self, block: Range) -> bytes:
        return self._packed[block.base * self._size : sum(block) * self._size]


class BackendNames(Mapping[int, BackendName]):
    """The names of the backends with these ids, each read when it is asked for.

    A name that was removed meanwhile is empty. They share the texts of nodes and zones, of which
    there are few. Raises KernelError.
    """

    def __init__(self, names: Map, ids: Set[int]) -> None:
        self._names, self._ids = names, ids
        self._share = dict[str, str]().setdefault

    def __getitem__(self, id: int) -> BackendName:
        if id not in self._ids:
            raise KeyError(id)
        node, target, zone = self._names.get(id) or UNKNOWN_NAME
        return BackendName(self._share(node, node), target, self._share(zone, zone))

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def _any(_key: object, _value: object) -> bool:
    return True


def valid_items(
    opened: Map,
    is_valid: Callable[[Any, Any], bool] = _any,
    *,
    repair: bool = True,
    unpack: Callable[[bytes], Any] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield a hash's valid entries; the others are left out, and deleted if ``repair``.

    An entry whose key has other bytes than an agent writes is left out too: no packet would find
    it. ``unpack``: instead of the map's own, if the values are not needed.
    """
    invalid: list[bytes] = []
    value_of = unpack or opened.value.unpack
    for packed_key, packed in opened.packed_items():
        key, value = opened.key.unpack(packed_key), value_of(packed)
        unchanged = opened.key.pack(key) == packed_key and opened.check.is_right(packed_key, packed)
        if unchanged and is_valid(key, value):
            yield key, value
        else:
            invalid.append(packed_key)
    for packed_key in invalid if repair else ():
        bpf.map_delete(opened.fd, packed_key)
    if invalid:
        number, done = len(invalid), "removed" if repair else "left out"
        invalid_ones = f"{number} invalid entries {done} (first key {invalid[0].hex()})"
        log.warning("map %s: %s", opened.spec.name, invalid_ones)
