# SPDX-License-Identifier: Apache-2.0
"""The content of the maps as bytes, which an agent that stops leaves to the next one.

To decode them takes a sixth of the time of reading the maps (clean_stop.py). Another version of
ebpflb cannot decode them.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from ebpflb.model.addresses import Address, Family
from ebpflb.model.services import PortName
from ebpflb.plan.desired import DesiredBackend
from ebpflb.plan.entries import (
    FIRST_BACKENDS,
    NO_LASTS,
    BackendName,
    Flags,
    Frontend,
    Range,
    ServiceEntry,
    SourceRange,
    Translation,
)
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.port_ranges import Lists, RangeLists
from ebpflb.plan.service_entries import ServiceEntries

_T = TypeVar("_T")
_Row = tuple[int, ...]
_RangeRow = tuple[int, int, int, bytes]
_BYTES = {Family.IPV4: 4, Family.IPV6: 16}  # of an address


class _Columns(Struct, array_like=True, gc=False):
    """The backends of a service port; a column whose values are all equal has one.

    ``flags``, ``nodes`` and ``zones`` are places in _Kept.
    """

    addresses: bytes
    ports: list[int]
    flags: list[int]
    weights: list[int]
    nodes: list[int]
    targets: list[str]
    zones: list[int]


class _Port(Struct, array_like=True, gc=False):
    """The entries of a service port.

    A row of ``services`` is port, protocol, place of the flags, and the numbers of a ServiceEntry,
    for each of ``frontends``.
    """

    name: PortName
    id: int
    base: int
    ids: list[int]
    frontends: bytes
    services: list[_Row]
    source_ranges: list[_RangeRow]
    backends: Raw  # _Columns
    lasts: list[int] = []  # the last ports of ``frontends``, where they are ranges


class _Shared(NamedTuple):
    """``texts`` and ``flags`` of _Kept, decoded."""

    texts: Sequence[str]
    flags: Sequence[Flags]


class _Kept(Struct, array_like=True):
    """MapContents, with the texts and flags that many backends have."""

    ports: list[Raw]  # _Port
    texts: list[str]
    flags: list[list[str]]
    cluster_ips: list[bytes]
    translations: list[tuple[int, bytes, int]]
    source_ranges: list[_RangeRow]


_kept = msgspec.msgpack.Decoder(_Kept)
_port = msgspec.msgpack.Decoder(_Port)
_columns = msgspec.msgpack.Decoder(_Columns)


def encode(contents: MapContents) -> bytes:
    """Return the contents as bytes.

    Of the leftovers only those have a place that a plan's quarantine leaves: see
    ``Planner.contents``.
    """
    texts, flags = _Places[str](), _Places[Flags]()
    ports = [_encode_port(name, it, texts, flags) for name, it in contents.entries.items()]
    return msgspec.msgpack.encode(
        _Kept(
            [Raw(msgspec.msgpack.encode(port)) for port in ports],
            list(texts),
            [sorted(each) for each in flags],
            [each.packed for each in contents.cluster_ips],
            [(id, ip.packed, port) for id, ip, port in contents.leftover_translations],
            _encode_ranges(contents.leftover_source_ranges),
        )
    )


class _Places(dict[_T, int]):
    """Value -> its place among all values that were asked for."""

    def __missing__(self, value: _T) -> int:
        place = self[value] = len(self)
        return place


def _encode_port(
    name: PortName, entries: ServiceEntries, texts: _Places[str], flags: _Places[Flags]
) -> _Port:
    backends = entries.backends
    columns = _Columns(
        _pack([each.address for each in backends], name.family),
        _column([each.port for each in backends]),
        _column([flags[each.flags] for each in backends]),
        _column([each.weight for each in backends]),
        _column([texts[each.name.node] for each in backends]),
        [each.name.target for each in backends],
        _column([texts[each.name.zone] for each in backends]),
    )
    return _Port(
        name,
        entries.id,
        entries.block.base,
        list(entries.ids),
        _pack([each.address for each in entries.services], name.family),
        [_row(*each, flags) for each in entries.services.items()],
        _encode_ranges(entries.source_ranges),
        Raw(msgspec.msgpack.encode(columns)),
        [entries.lasts[each] for each in entries.services] if entries.lasts else [],
    )


def _pack(addresses: Sequence[Address], family: Family) -> bytes:
    packed = b"".join([each.packed for each in addresses])
    assert len(packed) == len(addresses) * _BYTES[family], "an address of another family"
    return packed


def _row(frontend: Frontend, entry: ServiceEntry, flags: _Places[Flags]) -> _Row:
    numbers = entry.affinity_seconds, entry.slots, *entry.cluster, *entry.local, *entry.table
    return frontend.port, frontend.protocol, flags[entry.flags], *numbers


def _column(values: list[int]) -> list[int]:
    return values[:1] if len(set(values)) == 1 else values


def _encode_ranges(ranges: Iterable[SourceRange]) -> list[_RangeRow]:
    return [(*each[:3], each.address.packed) for each in ranges]


def decode(data: bytes | memoryview) -> MapContents:
    """Return the contents. Raises ValueError if the bytes are not those of ``encode``."""
    kept = _kept.decode(data)
    shared = _Shared(kept.texts, [frozenset(each) for each in kept.flags])
    contents = MapContents(
        leftover_backend_ids={id for id, _, _ in kept.translations},
        leftover_translations=[Translation(i, ip_address(ip), p) for i, ip, p in kept.translations],
        leftover_source_ranges=_decode_ranges(kept.source_ranges),
        cluster_ips={ip_address(each) for each in kept.cluster_ips},
    )
    for raw in kept.ports:
        port = _port.decode(raw)
        contents.entries[port.name] = _decode_port(port, shared)
    contents.range_lists = _range_lists(contents.entries.values())
    return contents


def _range_lists(entries: Iterable[ServiceEntries]) -> Lists:
    """Return the lists: nothing else is in them when an agent has stopped."""
    lists = RangeLists()
    for each in entries:
        lists.replace(each.lasts, moved=())
    return lists.listed()


def _decode_port(port: _Port, shared: _Shared) -> ServiceEntries:
    size, ids = len(port.ids), tuple(port.ids)
    first = ids[:FIRST_BACKENDS]
    rows = zip(_addresses(port.frontends, port.name.family), port.services, strict=True)
    services = dict(_service(port.id, first, address, row, shared.flags) for address, row in rows)
    return ServiceEntries(
        port.id,
        Range(port.base, size),
        services,
        KeptBackends(port.backends, port.name.family, size, shared),
        ids,
        frozenset(_decode_ranges(port.source_ranges)),
        dict(zip(services, port.lasts, strict=True)) if port.lasts else NO_LASTS,
    )


class KeptBackends(Sequence[DesiredBackend]):
    """The backends of a service port, decoded when they are first used.

    The first plan compares them, one service port after the other, and replaces them by equal ones:
    so there are never two copies of all.
    """

    def __init__(self, packed: Raw, family: Family, size: int, shared: _Shared) -> None:
        self._packed, self._family, self._size, self._shared = packed, family, size, shared
        self._decoded: tuple[DesiredBackend, ...] | None = None
        self._equal: object = None  # what was found equal: each plan asks twice

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, which: Any) -> Any:
        return self._all()[which]

    def __iter__(self) -> Iterator[DesiredBackend]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if other is self._equal:
            return True
        if not isinstance(other, Sequence) or len(other) != self._size or not self._equals(other):
            return False
        self._equal = other
        return True

    __hash__ = None  # type: ignore[assignment]

    def endpoints(self) -> Iterator[tuple[int, int]]:
        """Return the address of each as a number, and its port, without decoding the rest."""
        columns = _columns.decode(self._packed)
        numbers = _numbers(columns.addresses, self._family)
        return zip(numbers, _whole(columns.ports, self._size), strict=True)

    def _equals(self, other: Sequence[DesiredBackend]) -> bool:
        """Compare the columns, in a third of the time of decoding all backends.

        ``other`` has as many, of the same family.
        """
        columns, size, (texts, flags) = _columns.decode(self._packed), self._size, self._shared
        numbers, names = _numbers(columns.addresses, self._family), [each.name for each in other]
        return (
            [each.target for each in names] == columns.targets
            and [int(each.address) for each in other] == [*numbers]
            and [each.port for each in other] == _whole(columns.ports, size)
            and [each.flags for each in other] == [flags[it] for it in _whole(columns.flags, size)]
            and [each.node for each in names] == [texts[it] for it in _whole(columns.nodes, size)]
            and [each.zone for each in names] == [texts[it] for it in _whole(columns.zones, size)]
            and [each.weight for each in other] == _whole(columns.weights, size)
        )

    def _all(self) -> tuple[DesiredBackend, ...]:
        if self._decoded is None:
            self._decoded = self._decode(_columns.decode(self._packed))
        return self._decoded

    def _decode(self, columns: _Columns) -> tuple[DesiredBackend, ...]:
        (texts, flags), size = self._shared, self._size
        nodes = map(texts.__getitem__, _whole(columns.nodes, size))
        zones = map(texts.__getitem__, _whole(columns.zones, size))
        made = map(
            DesiredBackend,
            _addresses(columns.addresses, self._family),
            _whole(columns.ports, size),
            map(flags.__getitem__, _whole(columns.flags, size)),
            map(BackendName, nodes, columns.targets, zones),
            _whole(columns.weights, size),
        )
        return tuple(made)


def _service(
    id: int, backends: tuple[int, ...], address: Address, row: _Row, flags: Sequence[Flags]
) -> tuple[Frontend, ServiceEntry]:
    port, protocol, place, affinity, slots, *numbers = row
    cluster, local, table = map(Range, numbers[::2], numbers[1::2])
    entry = ServiceEntry(id, flags[place], affinity, slots, cluster, local, table, backends)
    return Frontend(address, port, protocol), entry


def _whole(column: list[int], size: int) -> list[int]:
    return column if len(column) == size else column * size


def _addresses(packed: bytes, family: Family) -> Iterator[Address]:
    return map(IPv4Address if family is Family.IPV4 else IPv6Address, _numbers(packed, family))


def _numbers(packed: bytes, family: Family) -> Iterable[int]:
    if family is Family.IPV4:
        return struct.unpack(f">{len(packed) // 4}I", packed)
    halves = struct.iter_unpack(">QQ", packed)
    return (high << 64 | low for high, low in halves)


def _decode_ranges(ranges: Iterable[_RangeRow]) -> list[SourceRange]:
    return [
        SourceRange(length, service, nodeport, ip_address(packed))
        for length, service, nodeport, packed in ranges
    ]


def endpoints(contents: MapContents) -> Iterator[tuple[Family, int, int]]:
    """Yield the endpoint of each backend with a translation: family, address as a number, port."""
    for _, address, port in contents.leftover_translations:
        yield Family(address.version), int(address), port
    for name, entries in contents.entries.items():
        assert isinstance(entries.backends, KeptBackends)
        for number, port in entries.backends.endpoints():
            yield name.family, number, port
