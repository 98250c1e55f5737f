# SPDX-License-Identifier: Apache-2.0
"""What the files of a directory say together, and which events a changed file is worth.

A file is parsed again when its stat signature changed or inotify named it. What it says now is
laid over what it said before; of the objects changed, each belongs to the first file in name order
that says it, and only those that come out different are told. Bad input never takes anything away:
an object that cannot be read is told as such, and a document or a file, which is told as error,
leaves what it said before in place.
"""

import logging
import os
import stat
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path

from ebpflb.cluster import manifest_file
from ebpflb.cluster.manifest_file import ObjectName
from ebpflb.cluster.selectors import selectors
from ebpflb.errors import ClusterError, InvalidObject
from ebpflb.model.events import (
    Changed,
    Event,
    Key,
    Kind,
    ReadObject,
    Removed,
    Replaced,
    SourceStatus,
)
from ebpflb.model.objects import Object

log = logging.getLogger(__name__)

Signature = tuple[int, ...]
UNREADABLE: Signature = ()


@dataclass(frozen=True, slots=True)
class _File:
    signature: Signature | None = None
    objects: dict[ObjectName, Object | InvalidObject] = field(default_factory=dict)
    error: str | None = None  # why not all that it says is in ``objects``


class ManifestDirectory:
    """The manifests of one directory, seen from the node of this name."""

    def __init__(self, directory: Path, node_name: str) -> None:
        self._directory = directory
        self._node_name = node_name
        self._selectors = selectors(node_name)
        self._files: dict[str, _File] = {}
        self._owners: dict[ObjectName, set[str]] = {}
        self._served: dict[ObjectName, ReadObject] = {}
        self._listed = False

    def scan(self, *, skip: Set[str] = frozenset()) -> list[Event]:
        """What is new in all files whose signature changed, ``skip`` those left for later.

        The first look gives one Replaced per kind, and errors. Raises ClusterError if there is
        no directory.
        """
        now = self._signatures()
        before = {name: file.signature for name, file in self._files.items()}
        names = {name for name in now | before if now.get(name) != before.get(name)}
        events = self.read(names - skip)
        if self._listed:
            return events
        self._listed = True
        return [*self._replace_all(), *(it for it in events if isinstance(it, SourceStatus))]

    def read(self, names: Iterable[str]) -> list[Event]:
        """What is new in the files of these names, which may be gone."""
        changed: set[ObjectName] = set()
        errors: list[Event] = []
        for name in sorted(names):
            before = self._files.pop(name, _File())
            after = self._parse(name, before)
            changed |= self._replace(name, before, after)
            if before.error != after.error:
                errors.append(SourceStatus(str(self._directory / name), after.error))
        settled = (self._update(name) for name in sorted(changed))
        return [event for event in settled if event] + errors

    def _signatures(self) -> dict[str, Signature]:
        try:
            names = [name for name in os.listdir(self._directory) if is_manifest(name)]
        except OSError as error:
            raise ClusterError(f"{self._directory}: {error.strerror}") from error
        found = ((name, _signature(self._directory / name)) for name in names)
        return {name: signature for name, signature in found if signature is not None}

    def _replace(self, name: str, before: _File, after: _File) -> set[ObjectName]:
        """Returns every object that the file says or said."""
        if after.signature is not None:
            self._files[name] = after
        for gone in before.objects.keys() - after.objects.keys():
            self._owners[gone].discard(name)
        for said in after.objects:
            self._owners.setdefault(said, set()).add(name)
        return before.objects.keys() | after.objects.keys()

    def _parse(self, name: str, before: _File) -> _File:
        """What cannot be read may still say what it said before."""
        path = self._directory / name
        signature = _signature(path)  # before the bytes: a later change then differs from it
        if signature is None:
            return _File()
        try:
            content = manifest_file.read(path)
        except ClusterError as error:
            return _File(signature, before.objects, str(error))
        if content.unnamed:
            objects = before.objects | content.objects
            return _File(signature, objects, "; ".join(content.unnamed))
        return _File(signature, content.objects)

    def _update(self, name: ObjectName) -> Event | None:
        """Serve the object as its first file says it; returns the event if that is news."""
        found = self._first_definition(name)
        if found and not self._is_selected(name, found.object):
            found = None
        served = self._served.pop(name, None)
        if found is None:
            return Removed(name.kind, name.key) if served else None
        self._served[name] = found
        return None if found == served else Changed(name.kind, name.key, found)

    def _is_selected(self, name: ObjectName, object: Object | InvalidObject) -> bool:
        """Of what cannot be read only the name is known."""
        if isinstance(object, InvalidObject):
            return name.kind is not Kind.NODE or name.key.name == self._node_name
        return self._selectors[name.kind].accepts(object)

    def _first_definition(self, name: ObjectName) -> ReadObject | None:
        files = sorted(self._owners[name])
        if not files:
            del self._owners[name]
            return None
        if files[1:]:
            log.warning("%s: in %s: the first one counts", name, " and ".join(files))
        return ReadObject(self._files[files[0]].objects[name], files[0])

    def _replace_all(self) -> list[Event]:
        objects: dict[Kind, dict[Key, ReadObject]] = {kind: {} for kind in Kind}
        for name, found in self._served.items():
            objects[name.kind][name.key] = found
        return [Replaced(kind, objects[kind]) for kind in Kind]


def is_manifest(name: str) -> bool:
    return not name.startswith(".") and name.endswith((".yaml", ".yml", ".json"))


def _signature(path: Path) -> Signature | None:
    """What changes when the file behind the name changes; None if there is no regular file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError:
        return UNREADABLE
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
