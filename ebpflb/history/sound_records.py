# SPDX-License-Identifier: Apache-2.0
"""Whether an agent can have written a record: its checksum only shows that it is complete."""

import zlib
from collections.abc import Iterable, Iterator

from ebpflb.errors import NodeError
from ebpflb.history.history_records import Begun, Entries, Record, Sync, Whole, Write
from ebpflb.kernel.maps import map_sizes

_LATEST = float(1 << 33)  # seconds since the epoch: later times may not fit into a calendar
_MOST_BYTES = 1 << 30  # of a checkpoint


def is_sound(record: Record) -> bool:
    """Whether the record has a valid time, known maps and complete entries.

    For ``Entries`` only the map is checked.
    """
    match record:
        case Entries():
            return record.map in map_sizes.LARGEST
        case Sync():
            return _is_time(record.at) and record.more >= 0 and all(map(_is_whole, record.writes))
        case Begun() | Whole():
            return _is_time(record.at)


def unpacked(parts: Iterable[Entries]) -> Iterator[Write]:
    """Yield a checkpoint's entries. Raises NodeError if no agent can have written them."""
    left = _MOST_BYTES
    for each in parts:
        try:
            keys, values = (_decompressed(it, left) for it in (each.keys, each.values))
        except (ValueError, zlib.error):
            raise NodeError(f"history: what it says of map {each.map} is damaged") from None
        left -= len(keys) + len(values)
        write = Write(each.map, keys, values)
        if not _is_whole(write):
            raise NodeError(f"history: what it says of map {each.map} is damaged")
        yield write


def _decompressed(packed: bytes, most: int) -> bytes:
    """Decompress. Raises zlib.error or ValueError, also if the result is longer than ``most``."""
    stream = zlib.decompressobj()
    found = stream.decompress(packed, most + 1)
    if len(found) > most or not stream.eof:
        raise ValueError(f"longer than {most} bytes, or not whole")
    return found


def _is_time(at: float) -> bool:
    return 0 <= at < _LATEST


def _is_whole(write: Write) -> bool:
    spec = map_sizes.LARGEST.get(write.map)
    if spec is None or len(write.keys) % spec.key_size:
        return False
    count = len(write.keys) // spec.key_size
    return write.values is None or len(write.values) == count * spec.value_size
