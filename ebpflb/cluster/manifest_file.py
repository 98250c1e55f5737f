# SPDX-License-Identifier: Apache-2.0
"""One manifest file -> its objects, and what is wrong with it.

YAML is read as kubectl reads it: several documents in a file, ``kind: List``, and the namespace
"default" if there is none. Objects of other kinds are skipped. JSON is read five times as fast.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from ebpflb.cluster.decoding import DECODE_ERRORS, convert
from ebpflb.errors import ClusterError, InvalidObject
from ebpflb.model.events import Key, Kind
from ebpflb.model.objects import Object

log = logging.getLogger(__name__)

KINDS = {
    ("v1", "Service"): Kind.SERVICE,
    ("discovery.k8s.io/v1", "EndpointSlice"): Kind.ENDPOINT_SLICE,
    ("v1", "Node"): Kind.NODE,
    ("networking.k8s.io/v1", "ServiceCIDR"): Kind.SERVICE_CIDR,
}
MAX_DEPTH = 1000  # levels of nesting; real manifests have about ten


class ObjectName(NamedTuple):
    """Which object of which kind."""

    kind: Kind
    key: Key

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


@dataclass(slots=True)
class Content:
    """The objects of a file, or what is wrong with them.

    ``unnamed``: errors in documents that do not even name their object. If there are any, an object
    that is missing here may still be meant to exist.
    """

    objects: dict[ObjectName, Object | InvalidObject] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)


def read(path: Path) -> Content:
    """Raises ClusterError if the file cannot be read or is not YAML."""
    content = Content()
    for where, document in _documents(path):
        try:
            _add(path, document, content)
        except InvalidObject as error:
            content.unnamed.append(f"{where}: {error}")
    return content


def _documents(path: Path) -> Iterator[tuple[str, Any]]:
    """Each document, those inside a List too, with its position in words."""
    for number, document in enumerate(_parse(path), 1):
        if not isinstance(document, dict) or document.get("kind") != "List":
            yield f"document {number}", document
            continue
        items = document.get("items") or []
        for position, item in enumerate(items if isinstance(items, list) else [items]):
            yield f"document {number}, item {position}", item


def _parse(path: Path) -> Iterator[Any]:
    """One document at a time: all at once would take 200 MB for 10,000 services."""
    try:
        data = path.read_bytes()
        if path.suffix == ".json":
            yield msgspec.json.decode(data)
        else:
            check_depth(data)
            yield from (it for it in yaml.load_all(data, Loader=Loader) if it is not None)
    except OSError as error:
        raise ClusterError(str(error.strerror)) from error
    except (yaml.YAMLError, ValueError, *DECODE_ERRORS) as error:
        reason = " ".join(str(error).split())
        raise ClusterError(f"neither YAML nor JSON: {reason}") from error


def check_depth(data: bytes) -> None:
    """Raises ValueError for deep nesting, which would be a segmentation fault in libyaml.

    Most files need not be parsed for it: a level takes a bracket, or half a column of a line.
    """
    longest = max(map(len, data.splitlines()), default=0)
    if data.count(b"[") + data.count(b"{") + 2 * longest < MAX_DEPTH:
        return
    depth = 0
    for event in yaml.parse(data, Loader=Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def _add(path: Path, document: Any, content: Content) -> None:
    """Raises InvalidObject if the document does not name its object."""
    if not isinstance(document, dict):
        raise InvalidObject("document", "not a mapping")
    kind = KINDS.get((_text(document, "apiVersion"), _text(document, "kind")))
    if kind is None:
        log.debug("%s: kind %s is skipped", path, document["kind"])
        return
    document, name = _named(kind, document)
    if name in content.objects:
        log.warning("%s: %s: defined twice, the first definition counts", path, name)
        return
    try:
        content.objects[name] = convert(kind, document)
    except InvalidObject as error:
        content.objects[name] = InvalidObject(error.field, error.reason)


def _named(kind: Kind, document: dict[Any, Any]) -> tuple[dict[Any, Any], ObjectName]:
    """The document with its namespace filled in, and the name of its object."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise InvalidObject("metadata", "not a mapping")
    name = _text(metadata, "name", "metadata.")
    if not kind.namespaced:
        return document, ObjectName(kind, Key("", name))
    namespace = metadata.get("namespace") or "default"
    document = document | {"metadata": metadata | {"namespace": namespace}}
    return document, ObjectName(kind, Key(str(namespace), name))


def _text(mapping: dict[Any, Any], field: str, where: str = "") -> str:
    value = mapping.get(field)
    if not value or not isinstance(value, str):
        raise InvalidObject(where + field, f"expected a name, got {value!r}")
    return value


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
