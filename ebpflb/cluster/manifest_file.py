# SPDX-License-Identifier: Apache-2.0
"""One manifest file -> its objects, and what is wrong with it.

YAML is read as kubectl reads it: several documents in a file, ``kind: List``, and the namespace
"default" if there is none. Objects of other kinds are skipped. JSON is read five times as fast.
"""

import logging
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ebpflb import regular_file
from ebpflb.cluster import manifest_kinds, yaml_documents
from ebpflb.cluster.decoding import DECODE_ERRORS, convert
from ebpflb.errors import ClusterError, InvalidObject, one_line
from ebpflb.model.events import Key, Kind
from ebpflb.model.objects import Object

log = logging.getLogger(__name__)

MAX_JSON_VALUES = 2_000_000  # of a file; each takes 70 bytes
MAX_NAME = 253  # characters of a name, as the API has it
_repr = reprlib.Repr()  # of values that may be very large
_repr.maxlevel = 1


class UnreadableFile(ClusterError):
    """It may be readable the next time, though nothing of it has changed."""


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
    """Raises ClusterError if the file cannot be read or is not YAML; UnreadableFile if it may be
    readable the next time.
    """
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
    """Each document that is not empty. Raises ClusterError."""
    try:
        data = regular_file.read(path)
        found = _json(data) if path.suffix == ".json" else yaml_documents.load_all(data)
        yield from (it for it in found if it is not None)
    except OSError as error:
        raise UnreadableFile(str(error.strerror)) from error
    except regular_file.UnusableFile as error:
        raise ClusterError(str(error)) from error
    except (ValueError, *DECODE_ERRORS) as error:
        raise ClusterError(one_line(f"neither YAML nor JSON: {error}")) from error


def _json(data: bytes) -> Iterator[Any]:
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES:,} values")
    yield msgspec.json.decode(data)


def _add(path: Path, document: Any, content: Content) -> None:
    """Raises InvalidObject if the document does not name its object."""
    if not isinstance(document, dict):
        raise InvalidObject("document", "not a mapping")
    kind = manifest_kinds.read(_text(document, "apiVersion"), _text(document, "kind"))
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
    metadata = metadata | {"namespace": metadata.get("namespace") or "default"}
    namespace = _text(metadata, "namespace", "metadata.")
    return document | {"metadata": metadata}, ObjectName(kind, Key(namespace, name))


def _text(mapping: dict[Any, Any], field: str, where: str = "") -> str:
    value = mapping.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise InvalidObject(where + field, f"expected a name, got {_repr.repr(value)}")
    return value
