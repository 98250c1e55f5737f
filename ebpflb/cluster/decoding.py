# SPDX-License-Identifier: Apache-2.0
"""JSON and YAML values -> the objects of ``model``, with only the fields that are used.

A list or a line of a watch is decoded in two steps: first the envelope with its objects as raw
bytes, then each object by itself, so that an invalid object does not affect others.
"""

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct, field

from ebpflb.errors import ClusterError, InvalidObject, in_json_words, unexpected
from ebpflb.model import endpoint_slices
from ebpflb.model.endpoint_slices import HEADLESS_LABEL, ReadSlice
from ebpflb.model.events import Key, Kind, ReadObject
from ebpflb.model.objects import EndpointSlice, Node, Object, Service, ServiceCIDR
from ebpflb.model.services import PROXY_NAME_LABEL

# Which objects are needed: sent to the API as selectors, applied here to manifests.
#
# See kube-proxy.md 1.1. A label is tested for presence, its value does not matter. An object that
# no longer matches is emitted as removed, one that now matches as changed, as the API does.


def query(kind: Kind, node_name: str) -> dict[str, str]:
    """Return the selectors of a list or watch request, for the node of this name; "": all nodes."""
    match kind:
        case Kind.SERVICE:
            absent = f"!{PROXY_NAME_LABEL}"
            return {"labelSelector": absent, "fieldSelector": "spec.clusterIP!=None"}
        case Kind.ENDPOINT_SLICE:
            return {"labelSelector": f"!{HEADLESS_LABEL}"}
        case Kind.NODE:
            return {"fieldSelector": f"metadata.name={node_name}"} if node_name else {}
    return {}


def is_selected(item: Object, node_name: str) -> bool:
    """Whether the selectors select the object."""
    labels = item.metadata.labels or {}
    match item:
        case Service():
            return PROXY_NAME_LABEL not in labels and item.spec.cluster_ip != "None"
        case EndpointSlice():
            return HEADLESS_LABEL not in labels
        case Node():
            return node_name in ("", item.metadata.name)
    return True


TYPES: dict[Kind, type[Object]] = {
    Kind.SERVICE: Service,
    Kind.ENDPOINT_SLICE: EndpointSlice,
    Kind.NODE: Node,
    Kind.SERVICE_CIDR: ServiceCIDR,
}
EXPIRED = {400, 410, 504}  # 400, 504: our version is newer than a server restored from a backup
_FORBIDDEN, _NOT_FOUND = 403, 404
RETRIABLE = {401, 408, 429}  # the 4xx that may pass: a token may be renewed, the load may fall
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class ResourceExpired(ClusterError):
    """The resource version or continue token is too old: a new list is needed."""


class ResourceNotFound(ClusterError):
    """The server does not have the resource: it is too old."""


class Forbidden(ClusterError):
    """The account of this process may not do this."""


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
    """One line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR, and the object."""

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
    """The identity of an object, even if the rest cannot be decoded; a bookmark has no key."""

    key: Key | None
    version: str


_pages = msgspec.json.Decoder(Page)
_items = msgspec.json.Decoder(list[Raw])
_lines = msgspec.json.Decoder(Line)
_named = msgspec.json.Decoder(_Named)
_objects = {kind: msgspec.json.Decoder(type) for kind, type in TYPES.items()}


def page(data: bytes) -> Page:
    """Decode a page of a list. Raises ClusterError if it is not one."""
    try:
        return _pages.decode(data)
    except DECODE_ERRORS as error:
        raise ClusterError(f"not a list: {in_json_words(str(error))}") from error


# A list is decoded while it arrives: the watch cache of the API server sends all objects of a kind
# in one page, tens of megabytes in a large cluster.

BATCH = 1 << 20  # bytes of a list that are decoded at once
MOST_WAITING = 64 << 20  # bytes of a list that wait for the end of an object; etcd takes 1.5 MB
# The first item; the list's metadata contains no array.
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
    """A partly arrived list; ``add`` was called with the items before ``_rest``.

    All items of a list begin with the same key, so this beginning shows where an item may end. It
    may also occur within an item: then the bytes before it are not the JSON of complete items,
    because no part of a JSON object is a JSON object, and they are decoded later, together with
    more.
    """

    def __init__(self, add: Callable[[Raw], None]) -> None:
        self._add = add
        self._start = b""  # of the list, up to its first item
        self._item_start = b""  # of each item
        self._rest = bytearray()
        self._enough = BATCH  # bytes of ``_rest``

    def take(self, part: bytes) -> None:
        self._rest += part
        if len(self._rest) >= self._enough:
            self._enough = BATCH if self._take_items() else 2 * len(self._rest)
        if len(self._rest) > MOST_WAITING:
            raise ClusterError(f"a list has {MOST_WAITING} bytes without the end of an object")

    def end(self) -> ListMetadata:
        """Add the last items; return the metadata.

        Raises ClusterError if the list is incomplete.
        """
        last = page(self._start + self._rest)
        for item in last.items or ():
            self._add(item)
        return last.metadata

    def _take_items(self) -> bool:
        """Add the items that have ended; return whether there are any."""
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
        del first  # the match keeps ``_rest`` from shrinking
        self._start = bytes(self._rest[:begin])
        del self._rest[:begin]
        return True


def line(data: bytes) -> Line:
    """Decode a line of a watch. Raises InvalidObject if it is not one."""
    try:
        return _lines.decode(data)
    except DECODE_ERRORS as error:
        raise invalid_object(error) from error


def decode(kind: Kind, data: bytes | Raw) -> Object:
    """JSON -> object. Raises InvalidObject naming the field that does not fit."""
    try:
        return _objects[kind].decode(data)
    except DECODE_ERRORS as error:
        raise invalid_object(error) from error


def convert(kind: Kind, value: Any) -> Object:
    """YAML value -> object. Raises InvalidObject naming the field that does not fit."""
    try:
        return msgspec.convert(value, TYPES[kind])
    except DECODE_ERRORS as error:
        raise invalid_object(error) from error


def read_object(kind: Kind, data: bytes | Raw, source: str) -> tuple[Key, ReadObject]:
    """Return an object by its key: the object itself, or the error of decoding it.

    Raises InvalidObject if not even its name can be decoded.
    """
    try:
        found = decode(kind, data)
    except InvalidObject as error:
        key = identify(data).key
        if key is None:
            raise
        invalid = InvalidObject(error.field, error.reason)  # new, without reference to the bytes
        return key, ReadObject(invalid, source)
    return key_of(found), ReadObject(compact(found), source)


def compact(found: Object) -> Object | ReadSlice | InvalidObject:
    """Return a slice in its stored form; other objects are returned unchanged.

    A decoded slice is several times as large, and a list of all is held until it is complete.
    """
    if not isinstance(found, EndpointSlice):
        return found
    try:
        return endpoint_slices.read(found)
    except InvalidObject as error:
        return InvalidObject(error.field, error.reason)
    except Exception as error:  # a mistake of the program stops no other object
        return unexpected(error)


def identify(data: bytes | Raw) -> Identity:
    """Decode only name and resource version, as far as possible."""
    try:
        name = _named.decode(data).metadata
    except DECODE_ERRORS:
        return Identity(None, "")
    return Identity(Key(name.namespace, name.name) if name.name else None, name.resource_version)


def is_older(version: str, than: str) -> bool:
    """Compare resource versions, which are decimal numbers of any length.

    False for other versions, which cannot be compared.
    """
    if not (version.isdigit() and than.isdigit()):
        return False
    return (len(version), version) < (len(than), than)


def key_of(object: Object) -> Key:
    namespaced = isinstance(object, Service | EndpointSlice)
    namespace = sys.intern(object.metadata.namespace) if namespaced else ""
    return Key(namespace, object.metadata.name)


def error_from_status(data: bytes | Raw, code: int = 0, where: str = "") -> ClusterError:
    """Return the error that a Status reports; it begins with ``where``.

    ``code`` is the HTTP status, if there was one.
    """
    try:
        status = msgspec.json.decode(data, type=ApiStatus)
    except DECODE_ERRORS:
        status = ApiStatus()
    code = code or status.code
    known = {_FORBIDDEN: Forbidden, _NOT_FOUND: ResourceNotFound}
    error = ResourceExpired if code in EXPIRED else known.get(code, ClusterError)
    return error(where + f"{code} {status.message}".strip())


def error_from_write(data: bytes, code: int, where: str) -> ClusterError:
    """Return the error of a write: RequestRejected if trying again cannot help."""
    error = error_from_status(data, code, where)
    return RequestRejected(str(error)) if code // 100 == 4 and code not in RETRIABLE else error


def invalid_object(error: Exception) -> InvalidObject:
    """Parse msgspec's message: Expected `int`, got `str` - at `$.spec.ports[0].port`."""
    reason, _, path = str(error).partition(" - at ")
    field = re.sub("[`$]", "", path).strip(". ") or "object"
    return InvalidObject(field, in_json_words(reason))
