# SPDX-License-Identifier: Apache-2.0
"""The content of the maps at a time, from the history's files."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import dropwhile, takewhile
from typing import Any, NamedTuple
from zlib import decompress

from ebpflb.errors import NodeError, in_words, one_line
from ebpflb.history import segments
from ebpflb.history.segments import Begun, Entries, Record, Sync, Whole, Write
from ebpflb.kernel.maps import layout, records
from ebpflb.options import Paths

_SERVICE = records.codec(layout.MAPS["services"].value)

# Times as people type them: 10m (ago), 14:03, 2026-11-22T14:03:10.
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_TODAY = re.compile(r"\d\d?:\d\d(:\d\d(\.\d+)?)?")


class PastMap:
    """A former state of a map, with the methods of ``Map``."""

    def __init__(self, name: str) -> None:
        self.spec = layout.LARGEST[name]
        self.key, self.value = records.codec(self.spec.key), records.codec(self.spec.value)
        self.check = layout.check_in(self.spec)
        self.packed: dict[bytes, bytes] = {}

    def get(self, key: Any) -> Any:
        """Return the value; an array's element that was never written is zero."""
        found = self.packed.get(self.key.pack(key))
        if found is None and self.spec.kind == "ARRAY":
            found = bytes(self.spec.value_size)
        return None if found is None else self.value.unpack(found)

    def get_range(self, first: int, count: int) -> list[Any]:
        return [self.get(key) for key in range(first, first + count)]

    def packed_items(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self.packed.items())

    def items(self) -> Iterator[tuple[Any, Any]]:
        for key, value in self.packed.items():
            yield self.key.unpack(key), self.value.unpack(value)


class State:
    """The recorded maps; ``frontends``: service id -> its keys in map services."""

    def __init__(self) -> None:
        self.maps: dict[str, PastMap] = {}
        self.frontends: dict[int, set[bytes]] = defaultdict(set)

    def apply(self, writes: Iterable[Write]) -> None:
        for name, keys, values in ((w.map, w.keys, w.values) for w in writes):
            self._apply(self.map(name), keys, values)

    def map(self, name: str) -> PastMap:
        if name not in self.maps:
            self.maps[name] = PastMap(name)
        return self.maps[name]

    def service_id(self, key: bytes) -> int | None:
        packed = self.map("services").packed.get(key)
        return None if packed is None else _id(packed)

    def _apply(self, past: PastMap, keys: bytes, values: bytes | None) -> None:
        """Apply a write; a deleted key that is missing was deleted before the checkpoint."""
        size, width = past.spec.key_size, past.spec.value_size
        for index in range(len(keys) // size):
            key = keys[index * size : (index + 1) * size]
            value = None if values is None else values[index * width : (index + 1) * width]
            if past.spec.name == "services":
                self._index(key, value)
            if value is None:
                past.packed.pop(key, None)
            else:
                past.packed[key] = value

    def _index(self, key: bytes, value: bytes | None) -> None:
        former = self.service_id(key)
        if former is not None:
            self.frontends[former].discard(key)
        if value is not None:
            self.frontends[_id(value)].add(key)


class File(NamedTuple):
    """The content of one file; ``whole_at`` is None if its checkpoint is incomplete.

    ``fresh``: its checkpoint does not continue the files before it. ``early`` is the number of its
    syncs that were made before the checkpoint was complete: their writes may be in it.
    """

    begun: Begun
    fresh: bool
    entries: list[Entries]
    syncs: list[Sync]
    whole_at: float | None
    early: int

    def checkpoint(self) -> State:
        """Return the state at the checkpoint."""
        state = State()
        state.apply(Write(e.map, decompress(e.keys), decompress(e.values)) for e in self.entries)
        return state


class Past:
    """The part of a history that this version can read; ``notes`` name the rest."""

    def __init__(self, paths: Paths) -> None:
        """Read the history. Raises NodeError if there is none."""
        self.notes: list[str] = []
        self.files: list[File] = []
        damaged = False
        for path in segments.paths_of(paths):
            read: list[Record] = []
            after_damage, damaged = damaged, False
            try:
                for record in segments.read(path):
                    read.append(record)
            except NodeError as error:
                self.notes.append(f"not read: {in_words(error)}")
                damaged = True
            self._add(read, fresh=after_damage)
        if self.begins is None:
            raise NodeError(f"no history in {paths.run}: did an agent of this version run here?")

    @property
    def begins(self) -> float | None:
        """When the first checkpoint was complete."""
        return next((file.whole_at for file in self.files if file.whole_at is not None), None)

    @property
    def times(self) -> list[float]:
        """When each of ``syncs`` was made."""
        whole = dropwhile(lambda file: file.whole_at is None, self.files)
        return [sync.at for file in whole for sync in file.syncs]

    def syncs(self, latest: int | None = None) -> Iterator[tuple[State, Sync]]:
        """Yield each sync with the maps before it; the caller applies the sync to them.

        With ``latest`` at least that number of the latest ones, from the newest files alone: each
        begins with a checkpoint.
        """
        state: State | None = None
        for file in self.files if latest is None else self._newest(latest):
            if file.whole_at is not None and (state is None or file.fresh):
                state = file.checkpoint()
            for sync in file.syncs if state else ():
                assert state is not None
                yield state, sync

    def _newest(self, latest: int) -> list[File]:
        """Return the newest files with this number of syncs after a complete checkpoint."""
        count = 0
        for number, file in reversed([*enumerate(self.files)]):
            count += len(file.syncs)
            if file.whole_at is not None and count - file.early >= latest:
                return self.files[number:]
        return self.files

    def at(self, time: float) -> State:
        """Return the state after the last sync up to a time.

        Syncs count in the order in which they were made: if the clock was set back, a time that
        came twice means the second one. Raises NodeError if the time is before the history begins.
        """
        last, count = self._place(time)
        state: State | None = None
        for number, file in enumerate(self.files[: last + 1]):
            is_whole = number < last or _is_whole(file, time)
            if file.whole_at is not None and is_whole and (state is None or file.fresh):
                state = file.checkpoint()
            for sync in file.syncs[: count if number == last else None] if state else ():
                assert state is not None
                state.apply(sync.writes)
        if state is None:
            raise NodeError(f"history begins at {moment(self.begins)}")
        return state

    def _place(self, time: float) -> tuple[int, int]:
        """Return the last file with something written up to a time, and how many of its syncs."""
        last, count = -1, 0
        for number, file in enumerate(self.files):
            if file.whole_at is not None and file.whole_at <= time:
                last, count = number, 0
            for place, sync in enumerate(file.syncs, 1):
                if sync.at <= time:
                    last, count = number, place
        return last, count

    def _add(self, read: list[Record], *, fresh: bool) -> None:
        begun = read[0] if read else None
        if not isinstance(begun, Begun):
            return
        if begun.layout != layout.layout_hash():
            until = moment(begun.at)
            version = one_line(begun.version)
            self.notes.append(f"not read: version {version} of {until} has other layouts")
            self.files.clear()
            return
        checkpoint = [*takewhile(lambda each: not isinstance(each, Whole), read)]
        self.files.append(
            File(
                begun,
                fresh or begun.fresh,
                [each for each in read if isinstance(each, Entries)],
                [each for each in read if isinstance(each, Sync)],
                next((each.at for each in read if isinstance(each, Whole)), None),
                sum(isinstance(each, Sync) for each in checkpoint),
            )
        )


def _is_whole(file: File, time: float) -> bool:
    """Whether the checkpoint was whole then; a file that begins later was, before the clock was set
    back.
    """
    return file.whole_at is not None and (file.whole_at <= time or time < file.begun.at)


def moment(time: float | None) -> str:
    """Return a time of this machine's zone, to the millisecond; "never" for None."""
    if time is None:
        return "never"
    return datetime.fromtimestamp(time).astimezone().isoformat(timespec="milliseconds")


def parse_time(text: str, now: float) -> float:
    """Return seconds since the epoch; a time without a zone is in this machine's zone.

    A time of day in the future means yesterday's. Raises ValueError with a sentence for the user.
    """
    try:
        return _parsed(text, now)
    except (ValueError, OverflowError):
        example = "14:03, 2026-11-22T14:03:10 or 10m"
        raise ValueError(f'"{text}" is not a time such as {example}') from None


def _parsed(text: str, now: float) -> float:
    """Parse a time. Raises ValueError or OverflowError."""
    if ago := _AGO.fullmatch(text):
        return now - float(ago[1]) * _UNITS[ago[2]]
    if _TODAY.fullmatch(text):
        day = datetime.fromtimestamp(now).date().isoformat()
        found = datetime.fromisoformat(f"{day}T{text.zfill(len(text) + (text[1] == ':'))}")
        at = found.timestamp()
        return at if at <= now else at - 86400
    return datetime.fromisoformat(text).timestamp()


def _id(packed: bytes) -> int:
    found: int = _SERVICE.unpack(packed).id
    return found
