# SPDX-License-Identifier: Apache-2.0
"""The objects that the files of a directory define together, and the events for a changed file.

A file is parsed again when its signature changed (see ``_signature``) or inotify named it. If
several files define an object, the first by name counts; an unchanged object gives no event. Bad
input never removes anything: an object that cannot be decoded is emitted as InvalidObject, and an
unreadable document or file is reported as an error, while its former objects stay.
"""

import logging
import os
import stat
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from ebpflb.cluster import decoding, manifest_file
from ebpflb.cluster.manifest_file import ObjectName
from ebpflb.errors import ClusterError, InvalidObject, one_line
from ebpflb.model.endpoint_slices import ReadSlice
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

_Signature = tuple[int, ...]
Found = Object | ReadSlice | InvalidObject
UNREADABLE: _Signature = ()


@dataclass(frozen=True, slots=True)
class _File:
    signature: _Signature | None = None
    objects: Mapping[ObjectName, Found] = field(default_factory=dict)
    error: str | None = None  # the unreadable part


class ManifestDirectory:
    """The manifests of one directory, selected for the node of this name."""

    def __init__(self, directory: Path, node_name: str) -> None:
        self._directory = directory
        self._node_name = node_name
        self._files: dict[str, _File] = {}
        self._owners: dict[ObjectName, tuple[str, ...]] = {}  # object -> its files
        self._served: dict[ObjectName, ReadObject] = {}
        self._listed = False

    def scan(self, *, skip: Set[str] = frozenset(), everything: bool = False) -> list[Event]:
        """Return the events for all files whose signature changed, or for all if ``everything``.

        Files in ``skip`` are left out. The first scan gives one Replaced for each kind, and errors.
        Raises ClusterError if there is no directory.
        """
        now = self._signatures()
        before = {name: file.signature for name, file in self._files.items()}
        names = {n for n in now | before if everything or now.get(n) != before.get(n)}
        events = self.read(names - skip)
        if self._listed:
            return events
        self._listed = True
        return [*self._replace_all(), *(it for it in events if isinstance(it, SourceStatus))]

    def read(self, names: Iterable[str]) -> list[Event]:
        """Return the events for the files of these names, which need not exist any more."""
        changed: set[ObjectName] = set()
        errors: list[Event] = []
        for name in sorted(names):
            before = self._files.pop(name, _File())
            after = self._parse(name, before)
            changed |= self._replace(name, before, after)
            if before.error != after.error:
                where = one_line(str(self._directory / name))
                errors.append(SourceStatus(where, after.error))
        updates = (self._update(name) for name in sorted(changed))
        return [event for event in updates if event] + errors

    def _signatures(self) -> dict[str, _Signature]:
        try:
            names = [name for name in os.listdir(self._directory) if is_manifest(name)]
        except OSError as error:
            raise ClusterError(f"{self._directory}: {error.strerror}") from error
        found = ((name, _signature(self._directory / name)) for name in names)
        return {name: signature for name, signature in found if signature is not None}

    def _replace(self, name: str, before: _File, after: _File) -> set[ObjectName]:
        """Replace a file; return the names of all objects that it defines or defined."""
        if after.signature is not None:
            self._files[name] = after
        for removed in before.objects.keys() - after.objects.keys():
            self._owners[removed] = tuple([it for it in self._owners[removed] if it != name])
        for defined in after.objects.keys() - before.objects.keys():
            self._owners[defined] = (*self._owners.get(defined, ()), name)
        return before.objects.keys() | after.objects.keys()

    def _parse(self, name: str, before: _File) -> _File:
        """Parse the file; if it is completely or partly unreadable, its former objects stay."""
        path = self._directory / name
        signature = _signature(path)  # taken before reading, so that a later change differs
        if signature is None:
            return _File()
        try:
            content = manifest_file.read(path)
        except ClusterError as error:
            again = isinstance(error, manifest_file.UnreadableFile)
            return _File(UNREADABLE if again else signature, before.objects, str(error))
        objects = {name: self._compact(name, found) for name, found in content.objects.items()}
        if content.unnamed:
            known = {**before.objects, **objects}
            return _File(signature, known, one_line("; ".join(content.unnamed)))
        return _File(signature, objects)

    def _update(self, name: ObjectName) -> Event | None:
        """Return the event for an object whose files changed; None if it stays equal."""
        found = self._first_definition(name)
        if found and not self._is_selected(name, found.object):
            found = None
        served = self._served.pop(name, None)
        if found is None:
            return Removed(name.kind, name.key) if served else None
        self._served[name] = found
        return None if found == served else Changed(name.kind, name.key, found)

    def _compact(self, name: ObjectName, found: Object | InvalidObject) -> Found:
        """Return a slice in its stored form, if its labels, which are not stored, select it."""
        if isinstance(found, InvalidObject) or not self._is_selected(name, found):
            return found
        return decoding.compact(found)

    def _is_selected(self, name: ObjectName, object: Found) -> bool:
        """Whether an object is selected; if it cannot be decoded only its name is known."""
        if isinstance(object, ReadSlice):
            return True
        if isinstance(object, InvalidObject):
            return name.kind is not Kind.NODE or name.key.name == self._node_name
        return decoding.is_selected(object, self._node_name)

    def _first_definition(self, name: ObjectName) -> ReadObject | None:
        files = sorted(self._owners[name])
        if not files:
            del self._owners[name]
            return None
        if files[1:]:
            shown = one_line(" and ".join(files))
            log.warning("%s: also in %s: the first file is used", name, shown)
        return ReadObject(self._files[files[0]].objects[name], one_line(files[0]))

    def _replace_all(self) -> list[Event]:
        objects: dict[Kind, dict[Key, ReadObject]] = {kind: {} for kind in Kind}
        for name, found in self._served.items():
            objects[name.kind][name.key] = found
        return [Replaced(kind, objects[kind]) for kind in Kind]


def is_manifest(name: str) -> bool:
    return not name.startswith(".") and name.endswith((".yaml", ".yml", ".json"))


def _signature(path: Path) -> _Signature | None:
    """Return values that change when the file behind the name changes; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError:
        return UNREADABLE
    if stat.S_ISDIR(status.st_mode):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
