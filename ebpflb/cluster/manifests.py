# SPDX-License-Identifier: Apache-2.0
"""A directory of manifests as a source: files -> objects -> events, followed with inotify.

A file is read when it was closed or renamed: half a file would be invalid YAML or, worse, would
define fewer objects. Other changes, such as the ``..data`` link that a ConfigMap mount replaces,
and ``Timing.rescan_interval`` cause a scan, which finds what inotify cannot see, such as a change
of a link's target. A scan skips files that are open for writing or changed within the last second.

If several files define an object, the first by name counts; an unchanged object gives no event. Bad
input never removes anything: an object that cannot be decoded is emitted as InvalidObject, and an
unreadable document or file is reported as an error, while its former objects stay.
"""

import logging
import os
import re
import stat
import time
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml
from inotify_simple import Event as InotifyEvent
from inotify_simple import INotify, flags

from ebpflb import files
from ebpflb.cluster import decoding
from ebpflb.cluster.source import Emit, RetryLoop, Timing
from ebpflb.errors import ClusterError, InvalidObject, instead_of_os_error, one_line
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
    Together,
)
from ebpflb.model.objects import Object
from ebpflb.workers import DescriptorWorker

log = logging.getLogger(__name__)

KINDS = {
    ("v1", "Service"): Kind.SERVICE,
    ("discovery.k8s.io/v1", "EndpointSlice"): Kind.ENDPOINT_SLICE,
    ("v1", "Node"): Kind.NODE,
    ("networking.k8s.io/v1", "ServiceCIDR"): Kind.SERVICE_CIDR,
}
MAX_NAME = 253  # characters of a name, the API's limit
MOST_LEVELS = 100  # of lists and mappings in each other: libyaml's loader has no bound of its own


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loads YAML without dates and base 60: 2001:2:3:4:5:6:7:8 and creationTimestamp stay text.

    Raises ValueError for more than MOST_LEVELS, which would overflow the stack of the process.
    """

    _levels = 0

    def descend_resolver(self, node: Any, index: Any) -> None:
        """The parser calls this at each node, before those inside of it."""
        self._levels += 1
        if self._levels > MOST_LEVELS:
            raise ValueError(f"nested more than {MOST_LEVELS} levels deep")

    def ascend_resolver(self) -> None:
        self._levels -= 1


Loader.yaml_implicit_resolvers = {
    first: [pair for pair in resolvers if pair[0].rpartition(":")[2] not in ("timestamp", "int")]
    for first, resolvers in Loader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(?:0x[0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)$"),
    list("-+0123456789"),
)


def load_documents(data: bytes) -> Iterator[Any]:
    """Yield the documents one at a time: all at once would take 200 MB for 10,000 services.

    Raises ValueError, with a message for the operator, for text that cannot be parsed.
    """
    try:
        yield from yaml.load_all(data, Loader=Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # PyYAML's constructors raise any, such as KeyError for !!bool x
        raise ValueError(f"{type(error).__name__}: {error}") from error


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
    """Read a file as kubectl does: several documents, ``kind: List``, the default namespace.

    Raises ClusterError if it is neither YAML nor JSON, which is read five times as fast, and
    OSError if it cannot be read.
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
    """Yield each document that is not empty. Raises ClusterError or OSError."""
    try:
        data = files.read_regular(path)
        is_json = path.suffix == ".json"
        found = iter([msgspec.json.decode(data)]) if is_json else load_documents(data)
        yield from (it for it in found if it is not None)
    except files.UnusableFile as error:
        raise ClusterError(str(error)) from error
    except (ValueError, *decoding.DECODE_ERRORS) as error:
        raise ClusterError(one_line(f"neither YAML nor JSON: {error}")) from error


def _add(path: Path, document: Any, content: Content) -> None:
    """Add the document's object. Raises InvalidObject if the document does not name it."""
    if not isinstance(document, dict):
        raise InvalidObject("document", "not a mapping")
    api_version, word = _text(document, "apiVersion"), _text(document, "kind")
    kind = KINDS.get((api_version, word))
    if kind is None:
        log.info("%s: %s of %s is not used here: skipped", path, word, api_version)
        return
    document, name = _named(kind, defaulted(kind, document))
    if name in content.objects:
        log.warning("%s: %s: defined twice, the first definition is used", path, name)
        return
    try:
        content.objects[name] = decoding.convert(kind, document)
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


def _named(kind: Kind, document: _Document) -> tuple[_Document, ObjectName]:
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


def _text(mapping: _Document, field: str, where: str = "") -> str:
    value = mapping.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise InvalidObject(where + field, f"expected a name, got {value!r}")
    return value


class Signature(NamedTuple):
    """Values that change when the file behind a name changes."""

    inode: int
    size: int
    modified: int  # nanoseconds since the epoch
    changed: int


UNREADABLE = Signature(0, 0, 0, 0)  # may be readable the next time, even without a change
Found = Object | ReadSlice | InvalidObject


@dataclass(frozen=True, slots=True)
class _File:
    signature: Signature | None = None
    objects: Mapping[ObjectName, Found] = field(default_factory=dict)
    error: str | None = None  # the unreadable part


class ManifestDirectory:
    """The manifests of one directory, selected for the node of this name.

    ``settled_after`` is in seconds; ``skipped`` tells whether the last scan skipped a file because
    it changed within that time.
    """

    def __init__(self, directory: Path, node_name: str, settled_after: float = 1.0) -> None:
        self._directory = directory
        self._node_name = node_name
        self._settled_after = settled_after
        self._files: dict[str, _File] = {}
        self._defined_in: dict[ObjectName, list[str]] = {}  # object -> its files, sorted
        self._twice: dict[ObjectName, str] = {}  # object -> its files, if it has several
        self._served: dict[ObjectName, ReadObject] = {}
        self._listed = False
        self.skipped = False

    def scan(self, opened: Set[str] = frozenset()) -> list[Event]:
        """Return the events for all files that changed, except those open for writing.

        The first scan reads every file, because none has former objects that could stay. It gives
        one Replaced for each kind, and errors. Raises ClusterError if there is no directory.
        """
        now = self._signatures()
        before = {name: file.signature for name, file in self._files.items()}
        names = {name for name in now | before if now.get(name) != before.get(name)} - opened
        if self._listed:
            settled = {name for name in names if self._is_settled(now.get(name))}
            self.skipped = names != settled
            return self.read(settled)
        self._listed = True
        events = self.read(names)
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

    def _replace(self, name: str, before: _File, after: _File) -> Set[ObjectName]:
        """Replace a file; return the names of all objects that it defines or defined."""
        if after.signature is not None:
            self._files[name] = after
        for removed in before.objects.keys() - after.objects.keys():
            self._defined_in[removed].remove(name)
        for defined in after.objects.keys() - before.objects.keys():
            insort(self._defined_in.setdefault(defined, []), name)
        return before.objects.keys() | after.objects.keys()

    def _update(self, name: ObjectName) -> Event | None:
        """Return the event for an object whose files changed; None if it is served as before.

        The first definition by file is served, if it is selected.
        """
        served = self._served.pop(name, None)
        if not (files := self._defined_in[name]):
            del self._defined_in[name]
        elif self._is_selected(name, found := self._files[files[0]].objects[name]):
            self._served[name] = ReadObject(found, one_line(files[0]))
        self._warn_of_several(name, files)
        if (now := self._served.get(name)) == served:
            return None
        return Changed(*name, now) if now else Removed(*name)

    def _warn_of_several(self, name: ObjectName, files: list[str]) -> None:
        former = self._twice.pop(name, "")
        if len(files) < 2:
            return
        shown = self._twice[name] = one_line(" and ".join(files))
        if shown != former:
            log.warning("%s: also in %s: the first file is used", name, shown)

    def _signatures(self) -> dict[str, Signature]:
        with instead_of_os_error(str(self._directory), ClusterError):
            names = [name for name in os.listdir(self._directory) if is_manifest(name)]
        found = ((name, _signature(self._directory / name)) for name in names)
        return {name: signature for name, signature in found if signature is not None}

    def _is_settled(self, file: Signature | None) -> bool:
        return file is None or not 0 <= time.time() - file.modified / 1e9 < self._settled_after

    def _parse(self, name: str, before: _File) -> _File:
        """Parse the file; if it is completely or partly unreadable, its former objects stay."""
        path = self._directory / name
        signature = _signature(path)  # taken before reading, so that a later change differs
        if signature is None:
            return _File()
        try:
            content = read(path)
        except OSError as error:
            return _File(UNREADABLE, before.objects, error.strerror)
        except ClusterError as error:
            return _File(signature, before.objects, str(error))
        objects = {name: self._compact(name, found) for name, found in content.objects.items()}
        if content.unnamed:
            known = {**before.objects, **objects}
            return _File(signature, known, one_line("; ".join(content.unnamed)))
        return _File(signature, objects)

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
            return name.kind is not Kind.NODE or self._node_name in ("", name.key.name)
        return decoding.is_selected(object, self._node_name)

    def _replace_all(self) -> list[Event]:
        objects: dict[Kind, dict[Key, ReadObject]] = {kind: {} for kind in Kind}
        for name, found in self._served.items():
            objects[name.kind][name.key] = found
        return [Replaced(kind, objects[kind]) for kind in Kind]


def is_manifest(name: str) -> bool:
    return not name.startswith(".") and name.endswith((".yaml", ".yml", ".json"))


def _signature(path: Path) -> Signature | None:
    """Return the signature of the file behind the name; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError:
        return UNREADABLE
    if stat.S_ISDIR(status.st_mode):
        return None
    return Signature(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


_DIRECTORY_LOST = flags.DELETE_SELF | flags.MOVE_SELF | flags.IGNORED | flags.UNMOUNT
_INOTIFY_MASK = (
    flags.CLOSE_WRITE
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.CREATE
    | flags.MODIFY
    | flags.DELETE
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)
MAX_BACKOFF = 1.0  # seconds: how soon a returning directory is noticed


class ManifestSource(DescriptorWorker):
    """The objects of a directory's YAML files, in one thread. See ``source.Source``."""

    patience = 1.0  # a file system may keep the thread for longer

    def __init__(
        self, emit: Emit, *, directory: Path, node_name: str, timing: Timing | None = None
    ) -> None:
        super().__init__("manifests")
        timing = timing or Timing()
        self._timing = replace(timing, backoff_max=min(timing.backoff_max, MAX_BACKOFF))
        self._directory = directory
        self._manifests = ManifestDirectory(directory, node_name, timing.settled_after)
        self._opened: set[str] = set()  # modified and not closed since
        self._loop = RetryLoop(str(directory), emit, self._timing, self.stopped)

    def prepare(self) -> None:
        """Check the directory. Raises ClusterError if there is none."""
        if not self._directory.is_dir():
            raise ClusterError(f"{self._directory}: not a directory")

    def start(self) -> None:
        """Start the thread. Raises ClusterError if there is no such directory."""
        self.prepare()
        super().start()

    def run(self) -> None:
        self._loop.run(self._follow_directory)

    def received(self) -> dict[str, float]:
        """Return one time for all kinds: a scan reads every change."""
        return {} if self._loop.received is None else {"manifests": self._loop.received}

    def stop(self) -> None:
        self.stopped.set()
        self._loop.end_pause()
        super().stop()

    def _follow_directory(self) -> None:
        """Follow the directory; return when the path has become another directory."""
        self._opened.clear()
        with self._inotify() as inotify:
            watch = self._watch(inotify)
            while self._watch(inotify) == watch and self._follow(inotify):
                pass

    def _follow(self, inotify: INotify) -> bool:
        """Scan once and follow the changes; return whether it is time for the next scan."""
        self._emit(self._manifests.scan(self._opened))
        begun = time.monotonic()
        self._loop.note_received()
        self._loop.clear_error()
        self._loop.reset_backoff()
        while (pause := begun + self._until_rescan() - time.monotonic()) > 0:
            self.wait([inotify], pause)
            if self.stopped.is_set():
                return False
            inotify_events = inotify.read(timeout=0)
            if any(event.mask & flags.Q_OVERFLOW for event in inotify_events):
                log.warning("%s: inotify lost events: reading what changed", self._directory)
                self._opened.clear()
                return True
            if any(event.mask & _DIRECTORY_LOST for event in inotify_events):
                return False
            self._emit(self._events_for(inotify_events))
        return True

    def _until_rescan(self) -> float:
        skipped = self._manifests.skipped
        return self._timing.settled_after if skipped else self._timing.rescan_interval

    def _inotify(self) -> INotify:
        """Create an instance. Raises ClusterError if there are too many, after a scan."""
        try:
            return INotify()
        except OSError as error:
            self._emit(self._manifests.scan())
            reason = f"inotify: {error.strerror}; see sysctl fs.inotify.max_user_instances"
            raise ClusterError(reason) from error

    def _watch(self, inotify: INotify) -> int:
        """Return the watch descriptor, which stays the same for the same directory."""
        with instead_of_os_error(str(self._directory), ClusterError):
            return int(inotify.add_watch(self._directory, _INOTIFY_MASK))

    def _emit(self, events: Sequence[Event]) -> None:
        """Emit what was read at once as one change: a Service and its slices fit together."""
        if events:
            self._loop.emit(Together(tuple(events)))

    def _events_for(self, inotify_events: list[InotifyEvent]) -> list[Event]:
        """Read the files that were closed, renamed or deleted; scan if anything else changed."""
        ended, others = set[str](), False
        for event in inotify_events:
            if event.mask & flags.CREATE or not is_manifest(event.name):
                others |= not is_hidden(event.name)
            elif event.mask & flags.MODIFY:
                self._opened.add(event.name)
            else:
                self._opened.discard(event.name)
                ended.add(event.name)
        events = self._manifests.read(ended - self._opened)
        return events + self._manifests.scan(self._opened) if others else events


def is_hidden(name: str) -> bool:
    """Whether it is an editor's hidden file, to be ignored; a ConfigMap's ``..data`` is not."""
    return name.startswith(".") and not name.startswith("..")
