# SPDX-License-Identifier: Apache-2.0
"""One manifest file -> its objects, and its errors.

YAML is read as kubectl reads it: several documents in a file, ``kind: List``, and "default" as the
default namespace. Objects of other kinds are skipped. JSON is read five times as fast.
"""

import logging
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from ebpflb import files
from ebpflb.cluster.decoding import DECODE_ERRORS, convert
from ebpflb.errors import ClusterError, InvalidObject, one_line
from ebpflb.model.events import Key, Kind
from ebpflb.model.objects import Object

# Which kind of object a manifest defines, and whether its name is misspelt.
#
# Objects of other kinds are skipped. But in the API groups of our kinds all kinds are known, so an
# unknown kind is a mistake, which would otherwise be ignored silently.

KINDS = {
    ("v1", "Service"): Kind.SERVICE,
    ("discovery.k8s.io/v1", "EndpointSlice"): Kind.ENDPOINT_SLICE,
    ("v1", "Node"): Kind.NODE,
    ("networking.k8s.io/v1", "ServiceCIDR"): Kind.SERVICE_CIDR,
}
# The other kinds of these groups, in Kubernetes 1.36.
_OTHERS = {
    "v1": "Binding ComponentStatus ConfigMap Endpoints Event LimitRange List Namespace"
    " PersistentVolume PersistentVolumeClaim Pod PodTemplate ReplicationController ResourceQuota"
    " Secret ServiceAccount",
    "discovery.k8s.io/v1": "",
    "networking.k8s.io/v1": "Ingress IngressClass IPAddress NetworkPolicy",
}
_VERSIONS = {kind: version for version, kind in KINDS}
_GROUPS = {version.rpartition("/")[0] for version in _OTHERS}


def read_kind(api_version: str, kind: str) -> Kind | None:
    """Return the kind, or None for kinds that are not used here.

    Raises InvalidObject if one of our kinds seems to be meant.
    """
    found = KINDS.get((api_version, kind))
    if found or kind in _OTHERS.get(api_version, "").split():
        return found
    if kind in _VERSIONS:
        _check_version(api_version, kind)
    elif api_version in _OTHERS:
        raise InvalidObject("kind", f"{api_version} has no {kind}{_hint(kind, api_version)}")
    return None


def _check_version(api_version: str, kind: str) -> None:
    """Refuse a wrong version.

    Other groups may have an equally named kind, as Knative has a Service.
    """
    wanted = _VERSIONS[kind]
    group = api_version.rpartition("/")[0]
    if group in _GROUPS or get_close_matches(api_version, [wanted], cutoff=0.8):
        raise InvalidObject("apiVersion", f"{api_version} has no {kind}: did you mean {wanted}?")


def _hint(kind: str, api_version: str) -> str:
    names = {name.lower(): name for name in (*_VERSIONS, *_OTHERS[api_version].split())}
    close = get_close_matches(kind.lower(), names, n=1)
    return f": did you mean {names[close[0]]}?" if close else ""


# YAML of unknown origin -> plain values, within limits.
#
# libyaml's events cost a twentieth of the values made from them, so a file is first read as events:
# they show its depth, and its size with all aliases and merge keys expanded. Without this check a
# file of a kilobyte could use all memory, or crash the process.

MAX_DEPTH = 1000  # levels of nesting; real manifests have about ten
MAX_NODES = 500_000  # values of one document, aliases expanded; each temporarily takes 400 bytes


def load_documents(data: bytes) -> Iterator[Any]:
    """Yield the documents one at a time: all at once would take 200 MB for 10,000 services.

    Raises ValueError, with a message for the operator, for any text that exceeds the limits or
    cannot be parsed.
    """
    try:
        check_values(data)
        yield from yaml.load_all(data, Loader=Loader)
    except Exception as error:  # PyYAML's constructors raise any, such as KeyError for !!bool x
        raise ValueError(describe_yaml_error(error)) from error


def describe_yaml_error(error: Exception) -> str:
    """Return the error in words, even if its text is only a value."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    known = isinstance(error, yaml.YAMLError | ValueError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def check_values(data: bytes) -> None:
    """Check depth and size. Raises YAMLError for invalid YAML.

    Raises ValueError for deep nesting, which would be a segmentation fault in libyaml, and for too
    many values.
    """
    count, opened, sizes = 0, list[tuple[str | None, int]](), dict[str | None, int]()
    for event in yaml.parse(data, Loader=Loader):
        match event:
            case yaml.ScalarEvent(anchor=anchor):  # the most frequent first
                sizes[anchor] = 1
                count += 1
            case yaml.CollectionStartEvent(anchor=anchor):
                opened.append((anchor, count))
                sizes[anchor] = MAX_NODES  # an alias within its own value never ends
                count += 1
            case yaml.CollectionEndEvent():
                anchor, before = opened.pop()
                sizes[anchor] = count - before
            case yaml.DocumentStartEvent():
                count, opened, sizes = 0, [], {}
            case yaml.AliasEvent(anchor=anchor):
                count += sizes.get(anchor, 1)  # the parser names an unknown one
        if len(opened) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        if count > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} values in a document, aliases expanded")


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Without dates and base 60: creationTimestamp stays text, and so does 2001:2:3:4:5:6:7:8."""


Loader.yaml_implicit_resolvers = {
    first: [pair for pair in resolvers if pair[0].rpartition(":")[2] not in ("timestamp", "int")]
    for first, resolvers in Loader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(?:0x[0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)$"),
    list("-+0123456789"),
)


log = logging.getLogger(__name__)

MAX_JSON_VALUES = 2_000_000  # of a file; each takes 70 bytes
MAX_NAME = 253  # characters of a name, the API's limit
_repr = reprlib.Repr()  # of values that may be very large
_repr.maxlevel = 1


class UnreadableFile(ClusterError):
    """The file may be readable the next time, even without a change."""


class ObjectName(NamedTuple):
    """The identity of an object: kind and key."""

    kind: Kind
    key: Key

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


@dataclass(slots=True)
class Content:
    """The objects of a file, or their errors.

    ``unnamed``: errors in documents that do not even name their object. If there are any, an object
    that is missing here may still be meant to exist.
    """

    objects: dict[ObjectName, Object | InvalidObject] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)


def read(path: Path) -> Content:
    """Read a file. Raises ClusterError if it cannot be read or is not YAML.

    Raises UnreadableFile if the file may be readable the next time.
    """
    content = Content()
    for where, document in _documents(path):
        try:
            _add(path, document, content)
        except InvalidObject as error:
            content.unnamed.append(f"{where}: {error}")
    return content


def _documents(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each document, including those inside a List, with its position in words."""
    for number, document in enumerate(_parse(path), 1):
        if not isinstance(document, dict) or document.get("kind") != "List":
            yield f"document {number}", document
            continue
        items = document.get("items") or []
        for position, item in enumerate(items if isinstance(items, list) else [items]):
            yield f"document {number}, item {position}", item


def _parse(path: Path) -> Iterator[Any]:
    """Yield each document that is not empty. Raises ClusterError."""
    try:
        data = files.read_regular(path)
        found = _json(data) if path.suffix == ".json" else load_documents(data)
        yield from (it for it in found if it is not None)
    except OSError as error:
        raise UnreadableFile(str(error.strerror)) from error
    except files.UnusableFile as error:
        raise ClusterError(str(error)) from error
    except (ValueError, *DECODE_ERRORS) as error:
        raise ClusterError(one_line(f"neither YAML nor JSON: {error}")) from error


def _json(data: bytes) -> Iterator[Any]:
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES:,} values")
    yield msgspec.json.decode(data)


def _add(path: Path, document: Any, content: Content) -> None:
    """Add the document's object. Raises InvalidObject if the document does not name it."""
    if not isinstance(document, dict):
        raise InvalidObject("document", "not a mapping")
    kind = read_kind(_text(document, "apiVersion"), _text(document, "kind"))
    if kind is None:
        log.debug("%s: kind %s is skipped", path, document["kind"])
        return
    document, name = _named(kind, defaulted(kind, document))
    if name in content.objects:
        log.warning("%s: %s: defined twice, the first definition is used", path, name)
        return
    try:
        content.objects[name] = convert(kind, document)
    except InvalidObject as error:
        content.objects[name] = InvalidObject(error.field, error.reason)


_Document = dict[Any, Any]


def defaulted(kind: Kind, document: _Document) -> _Document:
    """Return the document without null and "" where the API server would set a default."""
    if kind is Kind.SERVICE and isinstance(spec := document.get("spec"), dict):
        return document | {"spec": _with_filled_ports(_filled(spec))}
    return _with_filled_ports(document) if kind is Kind.ENDPOINT_SLICE else document


def _with_filled_ports(mapping: _Document) -> _Document:
    ports = mapping.get("ports")
    if not isinstance(ports, list):
        return mapping
    return mapping | {"ports": [_filled(it) if isinstance(it, dict) else it for it in ports]}


def _filled(mapping: _Document) -> _Document:
    return {name: value for name, value in mapping.items() if value not in (None, "")}


def _named(kind: Kind, document: dict[Any, Any]) -> tuple[dict[Any, Any], ObjectName]:
    """Return the document with its namespace filled in, and the name of its object."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise InvalidObject("metadata", "not a mapping")
    name = _text(metadata, "name", "metadata.")
    if not kind.namespaced:
        return document, ObjectName(kind, Key("", name))
    metadata = metadata | {"namespace": metadata.get("namespace") or "default"}
    namespace = _text(metadata, "namespace", "metadata.")
    return document | {"metadata": metadata}, ObjectName(kind, Key(namespace, name))


def _text(mapping: dict[Any, Any], field: str, where: str = "") -> str:
    value = mapping.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise InvalidObject(where + field, f"expected a name, got {_repr.repr(value)}")
    return value
