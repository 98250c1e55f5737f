# SPDX-License-Identifier: Apache-2.0
"""The bytes of a history file: what a crash or damage leaves is read up to there."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.history.history_records import (
    MAGIC,
    Begun,
    Entries,
    Record,
    Sync,
    Whole,
    Write,
    WriteCause,
    frame,
    unframed,
)

CAUSES = some.builds(WriteCause, *([some.text(max_size=9)] * 4))
WRITES = some.builds(
    Write, some.text(max_size=9), some.binary(max_size=9), some.none() | some.binary(max_size=9)
)
TIMES = some.floats(0, 2e9)
RECORDS: some.SearchStrategy[list[Record]] = some.lists(
    some.one_of(
        some.builds(Begun, TIMES, some.text(), some.text(), some.booleans()),
        some.builds(Entries, some.text(), some.binary(), some.binary()),
        some.builds(Whole, TIMES),
        some.builds(Sync, TIMES, some.lists(CAUSES), some.integers(0, 9), some.lists(WRITES)),
    ),
    max_size=5,
)


def written(records: list[Record]) -> bytes:
    return MAGIC + b"".join(map(frame, records))


@given(RECORDS)
def test_round_trip(records: list[Record]) -> None:
    """A written record reads back the same."""
    assert list(unframed(written(records))) == records


@given(RECORDS, some.data())
def test_cut(records: list[Record], data: some.DataObject) -> None:
    """A crash during a write loses the last record and nothing else."""
    whole = written(records)
    end = data.draw(some.integers(len(MAGIC), len(whole)))
    read = list(unframed(whole[:end]))
    assert read == records[: len(read)]
    assert len(written(records[: len(read) + 1])) > end or len(read) == len(records)


@given(RECORDS, some.data())
def test_damaged(records: list[Record], data: some.DataObject) -> None:
    """A byte that is another ends the reading before its record."""
    whole = bytearray(written(records))
    if len(whole) > len(MAGIC):
        at = data.draw(some.integers(len(MAGIC), len(whole) - 1))
        whole[at] ^= data.draw(some.integers(1, 255))
        read = list(unframed(bytes(whole)))
        assert read == records[: len(read)] and len(read) < len(records)


@given(some.binary(max_size=99))
def test_anything(data: bytes) -> None:
    """Any bytes after the head are read without an error; without the head they are refused."""
    list(unframed(MAGIC + data))
    if not data.startswith(MAGIC):
        with pytest.raises(ValueError, match="not a history of ebpflb"):
            list(unframed(data))
