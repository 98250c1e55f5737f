# SPDX-License-Identifier: Apache-2.0
"""The elements of the netfilter engine's nft table: the endpoint of each backend's id.

backends4, backends6    backend's id -> address and port
endpoints4, endpoints6  the same addresses and ports, once each (with ``drops_invalid``)
"""

import errno
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from ipaddress import ip_address
from itertools import chain, islice
from typing import NamedTuple

from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.nft import Refused, Session, Transaction
from ebpflb.kernel.netfilter.table import TABLE, TableOptions
from ebpflb.kernel.netlink import NESTED, attribute, attributes, list_items, nested, text
from ebpflb.model.addresses import Address

_IN_MESSAGE = 1000  # elements, in an attribute of at most 64 KiB
_IN_TRANSACTION = 4000  # about 5 ms
_IN_QUESTION = 100  # elements in one query
_LAST_PART = 100  # every part of a list except the last has more elements
_ID = struct.Struct("=I")  # as `meta priority` loads it
_PORT = struct.Struct(">H2x")
_DIFFERENT = {errno.ENOENT, errno.EEXIST, errno.EBUSY}  # the kernel has other elements


class ElementSet:
    """A map or set of the table: elements as bytes, from and to netlink."""

    def __init__(self, name: str, key_size: int, data_size: int) -> None:
        """``data_size`` is 0 for a set, whose elements have no data (b"")."""
        self.name, self.data_size = name, data_size
        key = self._head(1, key_size)
        data = self._head(2, data_size) if data_size else b""
        size = 4 + len(key) + key_size + len(data) + data_size
        self._key_head = struct.pack("=HH", size, 1 | NESTED) + key
        self._data_head = data
        self._struct = struct.Struct(f"=H{2 + len(key)}x{key_size}s{len(data)}x{data_size}s")

    @staticmethod
    def _head(kind: int, size: int) -> bytes:
        return struct.pack("=HHHH", 8 + size, kind | NESTED, 4 + size, 1)

    def encode(self, elements: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the contents of NFTA_SET_ELEM_LIST_ELEMENTS."""
        key_head, data_head = self._key_head, self._data_head
        return b"".join(key_head + key + data_head + data for key, data in elements)

    def encode_keys(self, keys: Iterable[bytes]) -> bytes:
        return b"".join(nested(1, nested(1, attribute(1, key))) for key in keys)

    def decode(self, message: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Return key and data of each element in a message."""
        content = attributes(message).get(3, b"")
        size = self._struct.size
        if len(content) % size == 0:
            fields = list(self._struct.iter_unpack(content))
            if all(length == size for length, _, _ in fields):
                return ((key, data) for _, key, data in fields)
        return map(_decode, list_items(content))  # some have more attributes, such as a comment

    def names(self) -> bytes:
        return text(1, TABLE.table) + text(2, self.name)


def _decode(element: bytes) -> tuple[bytes, bytes]:
    parts = attributes(element)
    return attributes(parts[1])[1], attributes(parts[2])[1] if 2 in parts else b""


class Change(NamedTuple):
    """An element to remove (``old``), to add (``new``), or to replace."""

    element_set: ElementSet
    key: bytes
    old: bytes | None
    new: bytes | None

    @property
    def backend_id(self) -> int | None:
        """The backend's id; None if the set has no ids."""
        return int(_ID.unpack(self.key)[0]) if self.element_set.data_size else None

    def __str__(self) -> str:
        """The fault that the change corrects."""
        id = self.backend_id
        name = _describe(self.key) if id is None else f"backend {id}"
        where = f"{self.element_set.name}: {name}"
        if self.old is None:
            return f"{where} is missing"
        if self.new is None:
            return f"{where} should not exist"
        return f"{where} is {_describe(self.old)}, but should be {_describe(self.new)}"


def pack(address: Address, port: int) -> bytes:
    """Return an endpoint in the format of maps and sets."""
    return address.packed + _PORT.pack(port)


def unpack(endpoint: bytes) -> tuple[Address, int]:
    """Return the address and port of an endpoint."""
    return ip_address(endpoint[:-4]), int(_PORT.unpack(endpoint[-4:])[0])


def _describe(endpoint: bytes) -> str:
    address, port = unpack(endpoint)
    return f"{address} port {port}"


BACKEND_SETS = {4: ElementSet("backends4", 4, 8), 6: ElementSet("backends6", 4, 20)}


def read_backends() -> dict[int, bytes]:
    """Return the endpoint of each backend's id in the kernel (see ``unpack``). Raises Refused."""
    return {
        _ID.unpack(key)[0]: endpoint
        for backends in BACKEND_SETS.values()
        for message in nft.own_elements(TABLE, backends.name)
        for key, endpoint in backends.decode(message)
    }


class Elements:
    """Write and compare elements. Methods raise Refused, also if the table is missing.

    Several backends can have the same endpoint, so endpoints are counted here: ``read`` counts the
    elements that it reads, ``write`` those that it is given, even if the kernel refuses them.
    ``repair`` does not count.
    """

    def __init__(self, session: Session, options: TableOptions) -> None:
        self._session = session
        self.endpoint_sets: dict[int, ElementSet] = {}
        if options.drops_invalid:
            self.endpoint_sets = {
                4: ElementSet("endpoints4", 8, 0),
                6: ElementSet("endpoints6", 20, 0),
            }
        # version of IP -> endpoint as a number -> its backends
        self._counts: dict[int, dict[int, int]] = {4: {}, 6: {}}

    def read(self) -> dict[int, bytes]:
        """Return the endpoint of each backend's id in the kernel (see ``unpack``)."""
        found = read_backends()
        self._counts = {4: {}, 6: {}}
        for endpoint in found.values():
            self._hold(endpoint)
        return found

    def write(
        self,
        new: Iterable[tuple[int, Address, int]],
        removed: Iterable[tuple[int, Address, int]] = (),
    ) -> None:
        """Add and remove backends: id, address and port.

        An id may be removed and added with another endpoint. A large change takes several
        transactions: additions first. A removed element may be missing.
        """
        old = {number: pack(address, port) for number, address, port in removed}
        released: list[bytes] = []
        changes = chain(self._add(new, old, released), self._remove(old, released))
        try:
            self.repair(changes)
        finally:
            for _ in changes:  # after an error: count the rest
                pass

    def _add(
        self, new: Iterable[tuple[int, Address, int]], old: dict[int, bytes], released: list[bytes]
    ) -> Iterator[Change]:
        """Move the endpoints of replaced backends from ``old`` to ``released``."""
        for number, address, port in new:
            endpoint, version = pack(address, port), address.version
            if self._hold(endpoint):
                yield Change(self.endpoint_sets[version], endpoint, None, b"")
            previous = old.get(number)
            if previous is not None and len(previous) == len(endpoint):
                released.append(old.pop(number))
            else:
                previous = None
            yield Change(BACKEND_SETS[version], _ID.pack(number), previous, endpoint)

    def _remove(self, old: dict[int, bytes], released: list[bytes]) -> Iterator[Change]:
        """Yield the removals; endpoints are removed last."""
        for number, endpoint in old.items():
            yield Change(BACKEND_SETS[_version(endpoint)], _ID.pack(number), endpoint, None)
        for endpoint in chain(released, old.values()):
            if self._release(endpoint):
                yield Change(self.endpoint_sets[_version(endpoint)], endpoint, b"", None)

    def _hold(self, endpoint: bytes) -> bool:
        """Count a backend; return whether its endpoint is new in the set."""
        if not self.endpoint_sets:
            return False
        counts, key = self._counts[_version(endpoint)], _to_key(endpoint)
        counts[key] = counts.get(key, 0) + 1
        return counts[key] == 1

    def _release(self, endpoint: bytes) -> bool:
        """Release an endpoint; return whether its last backend is gone."""
        counts, key = self._counts[_version(endpoint)], _to_key(endpoint)
        count = counts.get(key, 0)
        if count > 1:
            counts[key] = count - 1
        else:
            counts.pop(key, None)
        return count == 1

    def repair(self, changes: Iterable[Change]) -> None:
        """Make changes; an element that differs in the kernel from the expected one is no error."""
        iterator = iter(changes)
        while part := list(islice(iterator, _IN_TRANSACTION)):
            try:
                self._commit(part)
            except Refused as error:
                if error.number not in _DIFFERENT:
                    raise
                self._commit(self._expect(part))

    def _commit(self, changes: Iterable[Change]) -> None:
        removals: dict[ElementSet, list[bytes]] = {}
        additions: dict[ElementSet, list[tuple[bytes, bytes]]] = {}
        for element_set, key, old, new in changes:
            if old is not None:
                removals.setdefault(element_set, []).append(key)
            if new is not None:
                additions.setdefault(element_set, []).append((key, new))
        transaction = Transaction(TABLE)
        for element_set, keys in removals.items():
            for at in range(0, len(keys), _IN_MESSAGE):
                content = element_set.encode_keys(keys[at : at + _IN_MESSAGE])
                transaction.add(nft.DELETE_ELEMENTS, element_set.names(), nested(3, content))
        for element_set, elements in additions.items():
            for at in range(0, len(elements), _IN_MESSAGE):
                content = element_set.encode(elements[at : at + _IN_MESSAGE])
                transaction.add(nft.NEW_ELEMENTS, element_set.names(), nested(3, content))
        if transaction:
            transaction.commit(self._session)

    def _expect(self, changes: Sequence[Change]) -> list[Change]:
        """Return the same changes, with the elements that the kernel has."""
        existing: dict[tuple[ElementSet, bytes], bytes] = {}
        for element_set in {change.element_set for change in changes}:
            keys = [change.key for change in changes if change.element_set is element_set]
            for key, data in _get(element_set, keys):
                existing[element_set, key] = data
        updated = (it._replace(old=existing.get((it.element_set, it.key))) for it in changes)
        return [change for change in updated if change.old != change.new]

    def compare(self, wanted: Mapping[int, tuple[Address, int]]) -> Iterator[list[Change]]:
        """Yield the changes that ``repair`` has to make, in steps of about a millisecond.

        Elements may be written between two steps if ``wanted`` changes at the same time: each
        difference is checked again at once before it is yielded.
        """
        ids = [_ID.pack(id) for id in wanted]
        for version, backends in BACKEND_SETS.items():

            def backend(key: bytes, version: int = version) -> bytes | None:
                found = wanted.get(_ID.unpack(key)[0])
                return pack(*found) if found and found[0].version == version else None

            yield from _compare(backends, iter(ids), backend)
        for version, endpoints in self.endpoint_sets.items():

            def endpoint(key: bytes, version: int = version) -> bytes | None:
                return b"" if _to_key(key) in self._counts[version] else None

            keys = (_to_endpoint(key, version) for key in list(self._counts[version]))
            yield from _compare(endpoints, keys, endpoint)


def _compare(
    element_set: ElementSet, keys: Iterator[bytes], wanted: Callable[[bytes], bytes | None]
) -> Iterator[list[Change]]:
    """Yield the differences; ``keys`` has all wanted keys, and maybe others."""
    seen: set[bytes] = set()
    with (
        closing(nft.dump_parts(TABLE, nft.GET_ELEMENTS, element_set.names())) as parts,
        suppress(nft.Interrupted),
    ):
        for place, messages in enumerate(parts):
            elements = [item for message in messages for item in element_set.decode(message)]
            seen.update(key for key, _ in elements)
            candidates = [key for key, data in elements if wanted(key) != data]
            yield from _confirm(element_set, candidates, wanted)
            if place and len(elements) < _LAST_PART:
                break  # the kernel would continue as long as elements are written
    while some := list(islice(keys, _IN_MESSAGE)):
        candidates = [key for key in some if key not in seen and wanted(key) is not None]
        yield from _confirm(element_set, candidates, wanted)


def _confirm(
    element_set: ElementSet, candidates: Sequence[bytes], wanted: Callable[[bytes], bytes | None]
) -> Iterator[list[Change]]:
    """Yield at least one list of confirmed differences.

    A dump that was interrupted lacks elements, and shows old ones.
    """
    for at in range(0, max(len(candidates), 1), _IN_QUESTION):
        keys = candidates[at : at + _IN_QUESTION]
        existing = dict(_get(element_set, keys))
        found = (Change(element_set, key, existing.get(key), wanted(key)) for key in keys)
        yield [change for change in found if change.old != change.new]


def _get(element_set: ElementSet, keys: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the elements with these keys that the kernel has."""
    for at in range(0, len(keys), _IN_QUESTION):
        some = (element_set.encode_keys([key]) for key in keys[at : at + _IN_QUESTION])
        requests = [element_set.names() + nested(3, content) for content in some]
        for message in nft.get(TABLE, nft.GET_ELEMENTS, requests):
            if message is not None:
                yield from element_set.decode(message)


def _version(endpoint: bytes) -> int:
    return 4 if len(endpoint) == 8 else 6


def _to_key(endpoint: bytes) -> int:
    """Return an endpoint as a number, which takes less memory."""
    return int.from_bytes(endpoint[:-2], "big")


def _to_endpoint(key: int, version: int) -> bytes:
    return (key << 16).to_bytes(8 if version == 4 else 20, "big")
