# SPDX-License-Identifier: Apache-2.0
"""JSON and YAML values -> the objects of ``model``, with only the fields that are used.

A list or a line of a watch is decoded in two steps: first the envelope with its objects as raw
bytes, then each object by itself, so that an invalid object does not affect others.
"""

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct, field

from ebpflb.errors import ClusterError, InvalidObject, in_json_words
from ebpflb.model import endpoint_slices
from ebpflb.model.endpoint_slices import HEADLESS_LABEL, ReadSlice
from ebpflb.model.events import Key, Kind, ReadObject
from ebpflb.model.objects import EndpointSlice, Node, Object, Service, ServiceCIDR
from ebpflb.model.services import PROXY_NAME_LABEL

# Which objects are needed: sent to the API as selectors, applied here to manifests.
#
# kube-proxy.md 1.1. A label is tested for presence, its value does not matter. An object that no
# longer matches is emitted as removed, one that now matches as changed; the API does so by itself.

FIELDS: dict[str, Callable[[Object], str]] = {
    "metadata.name": lambda item: item.metadata.name,
    "spec.clusterIP": lambda item: item.spec.cluster_ip if isinstance(item, Service) else "",
}


@dataclass(frozen=True, slots=True)
class FieldTest:
    """``field`` must be ``value`` or, if not ``equal``, anything else."""

    field: str
    equal: bool
    value: str

    def __str__(self) -> str:
        return f"{self.field}{'=' if self.equal else '!='}{self.value}"

    def accepts(self, item: Object) -> bool:
        return (FIELDS[self.field](item) == self.value) == self.equal


@dataclass(frozen=True, slots=True)
class Selector:
    """Objects without the label ``absent`` that pass ``test``; None: no condition."""

    absent: str | None = None
    test: FieldTest | None = None

    def query(self) -> dict[str, str]:
        """The parameters of a list or watch request."""
        query = {}
        if self.absent:
            query["labelSelector"] = f"!{self.absent}"
        if self.test:
            query["fieldSelector"] = str(self.test)
        return query

    def accepts(self, item: Object) -> bool:
        return self.absent not in (item.metadata.labels or {}) and (
            self.test is None or self.test.accepts(item)
        )


def selectors(node_name: str) -> dict[Kind, Selector]:
    """The objects that the node of this name needs."""
    return {
        Kind.SERVICE: Selector(PROXY_NAME_LABEL, FieldTest("spec.clusterIP", False, "None")),
        Kind.ENDPOINT_SLICE: Selector(HEADLESS_LABEL),
        Kind.NODE: Selector(test=FieldTest("metadata.name", True, node_name)),
        Kind.SERVICE_CIDR: Selector(),
    }


TYPES: dict[Kind, type[Object]] = {
    Kind.SERVICE: Service,
    Kind.ENDPOINT_SLICE: EndpointSlice,
    Kind.NODE: Node,
    Kind.SERVICE_CIDR: ServiceCIDR,
}
EXPIRED = {400, 410, 504}  # 400, 504: our version is newer than a server restored from a backup
_NOT_FOUND = 404
RETRIABLE = {401, 408, 429}  # of all 4xx: a token may be renewed, the load may fall
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class ResourceExpired(ClusterError):
    """The resource version or continue token is too old: a new list is needed."""


class ResourceNotFound(ClusterError):
    """The server does not have the resource: it is older than that."""


class WatchSilent(ClusterError):
    """A watch sent nothing for so long that its connection may be dead."""


class RequestRejected(ClusterError):
    """The server rejects the request, and would reject it again."""


class ListMetadata(Struct, frozen=True, rename="camel"):
    resource_version: str
    token: str = field(name="continue", default="")


class Page(Struct, frozen=True):
    """One page of a list."""

    metadata: ListMetadata
    items: list[Raw] | None = None


class Line(Struct, frozen=True):
    """One line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR, and of what."""

    type: str
    object: Raw


class ApiStatus(Struct, frozen=True):
    """The API server's error."""

    code: int = 0
    message: str = ""


class _Name(Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class _Named(Struct, frozen=True):
    metadata: _Name


class Identity(NamedTuple):
    """Which object it is, even if the rest cannot be decoded; a bookmark has no key."""

    key: Key | None
    version: str


_pages = msgspec.json.Decoder(Page)
_items = msgspec.json.Decoder(list[Raw])
_lines = msgspec.json.Decoder(Line)
_named = msgspec.json.Decoder(_Named)
_objects = {kind: msgspec.json.Decoder(type) for kind, type in TYPES.items()}


def page(data: bytes) -> Page:
    """Raises ClusterError if this is not a page of a list."""
    try:
        return _pages.decode(data)
    except DECODE_ERRORS as error:
        raise ClusterError(f"not a list: {in_json_words(str(error))}") from error


# A list is decoded while it arrives: the watch cache of the API server sends all objects of a kind
# in one page, tens of megabytes in a large cluster.

_BATCH = 1 << 20  # bytes of a list that are decoded at once
# Of the list itself, whose metadata has no array.
_FIRST_ITEM = re.compile(rb'[^[]*"items"\s*:\s*\[\s*(\{\s*"[^"]*"\s*:)')


def read_list(parts: Iterable[bytes], add: Callable[[Raw], None]) -> ListMetadata:
    """Call ``add`` with each item of a list, soon after the item has arrived.

    Raises ClusterError if the parts are not a list; ``add`` may have been called before that.
    """
    arriving = _ArrivingList(add)
    for part in parts:
        arriving.take(part)
    return arriving.end()


class _ArrivingList:
    """A list of which a part has arrived; ``add`` has been called with the items before ``_rest``.

    All items of a list begin with the same key, so this beginning shows where an item may end. It
    may also stand within an item: then the bytes before it are not the JSON of whole items, because
    no part of a JSON object is a JSON object, and they are decoded later, together with more.
    """

    def __init__(self, add: Callable[[Raw], None]) -> None:
        self._add = add
        self._start = b""  # of the list, up to its first item
        self._item_start = b""  # of each item
        self._rest = bytearray()
        self._enough = _BATCH  # bytes of ``_rest``

    def take(self, part: bytes) -> None:
        self._rest += part
        if len(self._rest) >= self._enough:
            self._enough = _BATCH if self._take_items() else 2 * len(self._rest)

    def end(self) -> ListMetadata:
        """Raises ClusterError if what has arrived is not a whole list."""
        last = page(self._start + self._rest)
        for item in last.items or ():
            self._add(item)
        return last.metadata

    def _take_items(self) -> bool:
        """Whether some items have ended."""
        if not self._start and not self._find_first():
            return False
        end = self._rest.rfind(self._item_start)
        items = self._rest[:end].rstrip()
        if not items.endswith(b","):
            return False
        try:
            decoded = _items.decode(b"[" + items[:-1] + b"]")
        except DECODE_ERRORS:
            return False
        for item in decoded:
            self._add(item)
        del self._rest[:end]
        return True

    def _find_first(self) -> bool:
        first = _FIRST_ITEM.match(self._rest)
        if first is None:
            return False
        begin, self._item_start = first.start(1), bytes(first[1])
        del first  # it keeps ``_rest`` from shrinking
        self._start = bytes(self._rest[:begin])
        del self._rest[:begin]
        return True


def line(data: bytes) -> Line:
    """Raises InvalidObject if this is not a line of a watch."""
    try:
        return _lines.decode(data)
    except DECODE_ERRORS as error:
        raise _invalid(error) from error


def decode(kind: Kind, data: bytes | Raw) -> Object:
    """JSON -> object. Raises InvalidObject naming the field that does not fit."""
    try:
        return _objects[kind].decode(data)
    except DECODE_ERRORS as error:
        raise _invalid(error) from error


def convert(kind: Kind, value: Any) -> Object:
    """YAML value -> object. Raises InvalidObject naming the field that does not fit."""
    try:
        return msgspec.convert(value, TYPES[kind])
    except DECODE_ERRORS as error:
        raise _invalid(error) from error


def read_object(kind: Kind, data: bytes | Raw, source: str) -> tuple[Key, ReadObject]:
    """An object by its key: the object itself, or why it cannot be decoded or read.

    Raises InvalidObject if not even its name can be decoded.
    """
    try:
        found = decode(kind, data)
    except InvalidObject as error:
        key = identify(data).key
        if key is None:
            raise
        invalid = InvalidObject(error.field, error.reason)  # a new one, that refers to no bytes
        return key, ReadObject(invalid, source)
    return key_of(found), ReadObject(compact(found), source)


def compact(found: Object) -> Object | ReadSlice | InvalidObject:
    """A slice as it will be stored: as it was decoded it is several times as large, and a list of
    all is held until it is complete.
    """
    if not isinstance(found, EndpointSlice):
        return found
    try:
        return endpoint_slices.read(found)
    except InvalidObject as error:
        return InvalidObject(error.field, error.reason)


def identify(data: bytes | Raw) -> Identity:
    """Only name and resource version, as far as they can be decoded."""
    try:
        name = _named.decode(data).metadata
    except DECODE_ERRORS:
        return Identity(None, "")
    return Identity(Key(name.namespace, name.name) if name.name else None, name.resource_version)


def is_older(version: str, than: str) -> bool:
    """Compare resource versions: decimal numbers of any length. Others cannot be compared."""
    if not (version.isdigit() and than.isdigit()):
        return False
    return (len(version), version) < (len(than), than)


def key_of(object: Object) -> Key:
    namespaced = isinstance(object, Service | EndpointSlice)
    namespace = sys.intern(object.metadata.namespace) if namespaced else ""
    return Key(namespace, object.metadata.name)


def error_from_status(data: bytes | Raw, code: int = 0) -> ClusterError:
    """The error that a Status reports; ``code`` is the HTTP status, if there was one."""
    try:
        status = msgspec.json.decode(data, type=ApiStatus)
    except DECODE_ERRORS:
        status = ApiStatus()
    code = code or status.code
    error = (
        ResourceExpired
        if code in EXPIRED
        else ResourceNotFound
        if code == _NOT_FOUND
        else ClusterError
    )
    return error(f"{code} {status.message}".strip())


def error_from_write(data: bytes, code: int) -> ClusterError:
    """The same for a request that writes: RequestRejected if trying again cannot help."""
    error = error_from_status(data, code)
    return RequestRejected(str(error)) if code // 100 == 4 and code not in RETRIABLE else error


def _invalid(error: Exception) -> InvalidObject:
    """msgspec says: Expected `int`, got `str` - at `$.spec.ports[0].port`."""
    reason, _, path = str(error).partition(" - at ")
    field = re.sub("[`$]", "", path).strip(". ") or "object"
    return InvalidObject(field, in_json_words(reason))
