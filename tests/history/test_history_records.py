# SPDX-License-Identifier: Apache-2.0
"""The lines of a history file: what a crash or damage leaves is read up to there."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.errors import NodeError
from ebpflb.history import segments
from ebpflb.history.segments import (
    Begun,
    Entries,
    Record,
    Sync,
    Whole,
    Write,
    WriteCause,
    as_line,
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
BEGUN = Begun(0.0, "layout", "version", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("history")


def written(folder: Path, data: bytes) -> Path:
    path = folder / "state.00000001.history"
    path.write_bytes(data)
    return path


def lines(records: list[Record]) -> list[bytes]:
    return [as_line(record) for record in (BEGUN, *records)]


def read(path: Path) -> list[Record]:
    """The records after the first one."""
    first, *others = segments.read(path)
    assert first == BEGUN
    return others


@given(RECORDS)
def test_round_trip(folder: Path, records: list[Record]) -> None:
    """A written record reads back the same, and each is a line that any reader of JSON takes."""
    written_lines = lines(records)
    assert all(isinstance(json.loads(line), dict) for line in written_lines)
    assert read(written(folder, b"".join(written_lines))) == records


@given(RECORDS, some.data())
def test_cut(folder: Path, records: list[Record], data: some.DataObject) -> None:
    """A crash during a write loses the last record and nothing else."""
    first, *others = lines(records)
    whole = b"".join(others)
    end = data.draw(some.integers(0, len(whole)))
    assert read(written(folder, first + whole[:end])) == records[: whole[:end].count(b"\n")]


@given(RECORDS, some.integers(0), some.binary(max_size=99))
def test_damaged(folder: Path, records: list[Record], at: int, damage: bytes) -> None:
    """A line that is no record is named by its number; what is before it is read."""
    all_lines = lines(records)
    at = 1 + at % len(all_lines)
    bad = b"\xff" + damage.replace(b"\n", b"") + b"\n"
    path = written(folder, b"".join([*all_lines[:at], bad, *all_lines[at:]]))
    found: list[Record] = []
    with pytest.raises(NodeError, match=f"line {at + 1} is damaged"):
        for record in segments.read(path):
            found.append(record)
    assert found[1:] == records[: at - 1]


@given(some.binary(max_size=99))
def test_anything(folder: Path, data: bytes) -> None:
    """Any bytes are read or named."""
    with suppress(NodeError):
        read(written(folder, as_line(BEGUN) + data))
    if data:
        with pytest.raises(NodeError, match="line 1 is damaged"):
            list(segments.read(written(folder, data)))
