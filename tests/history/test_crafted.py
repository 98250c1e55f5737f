# SPDX-License-Identifier: Apache-2.0
"""Histories whose checksums are right and whose content is none that an agent writes."""

import tempfile
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from zlib import Z_FULL_FLUSH, compress, compressobj

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.errors import EbpflbError
from ebpflb.history.changes import changes
from ebpflb.history.history_records import (
    MAGIC,
    Begun,
    Entries,
    Record,
    Reset,
    Sync,
    Whole,
    Write,
    WriteCause,
    frame,
)
from ebpflb.history.past import Past
from ebpflb.history.recorder import RECORDED, History
from ebpflb.kernel.maps import layout, map_sizes
from ebpflb.options import Paths
from ebpflb.tools.dump import past_maps
from tests.history.fakes import FakeMap

BEGUN, WHOLE = Begun(1.0, layout.layout_hash(), "1", True), Whole(2.0)
TEXTS = some.text(max_size=9) | some.sampled_from(("\x1b[31m", "a/b:c", "\n", "/" * 999))
TIMES = some.floats() | some.floats(0, 3e9)


def zeros(mebibytes: int) -> bytes:
    """Return the beginning of a compressed text of this many zeros.

    All parts are compressed alike, so only two are compressed.
    """
    compressing, mebibyte = compressobj(), bytes(1 << 20)
    first, other = (
        compressing.compress(mebibyte) + compressing.flush(Z_FULL_FLUSH) for _ in range(2)
    )
    return first + other * (mebibytes - 1)


def told(paths: Paths) -> tuple[list[str], str]:
    """Return the remarks about unreadable parts, and the error that ends a command, if any."""
    try:
        past = Past(paths)
        found = list(changes(past))
        past_maps(past, inf, ())
        past_maps(past, 3.0, ())
    except EbpflbError as error:
        return [], str(error)
    assert all(each.time for each in found)
    return past.notes, ""


def write(folder: Path, records: Sequence[Record]) -> Paths:
    paths = Paths(Path("/state"), folder)
    path = folder / f"{paths.name}.00000001.history"
    path.write_bytes(MAGIC + b"".join(map(frame, records)))
    return paths


@some.composite
def writes(draw: some.DrawFn) -> Write:
    """Draw writes of entries with arbitrary content, most of them whole."""
    name = draw(some.sampled_from(RECORDED))
    spec, count = map_sizes.LARGEST[name], draw(some.integers(0, 3))
    bytes_of = some.sampled_from((b"\0", b"\1", b"\x7f", b"\xff"))
    keys = draw(bytes_of) * spec.key_size * count
    values = draw(bytes_of) * spec.value_size * count
    return draw(
        some.sampled_from(
            (
                Write(name, keys, values), Write(name, keys, values), Write(name, keys, None),
                Write(name, keys[1:], values), Write(name, keys, values[1:]),
                Write("no such map", keys, values), Write("tcp_flows", keys, values),
            )
        )
    )  # fmt: skip


CAUSES = some.builds(WriteCause, *([TEXTS] * 4))
RESETS = some.builds(Reset, *([TEXTS] * 3))
SYNCS = some.builds(
    Sync, TIMES, some.lists(CAUSES, max_size=3), some.integers(-(2**63), 2**63 - 1),
    some.lists(writes(), max_size=4), some.lists(RESETS, max_size=2),
)  # fmt: skip
ENTRIES = writes().map(lambda it: Entries(it.map, compress(it.keys), compress(it.values or b"")))


@given(some.lists(ENTRIES, max_size=3), some.lists(SYNCS, max_size=4))
def test_any_record(entries: list[Entries], syncs: list[Sync]) -> None:
    """A record with arbitrary entries is read, or named in one line."""
    with tempfile.TemporaryDirectory() as folder:
        notes, error = told(write(Path(folder), [BEGUN, *entries, WHOLE, *syncs]))
    assert not any("\n" in line or not line.isprintable() for line in (*notes, error))


CRAFTED: dict[str, tuple[Record, ...]] = {
    "a file of no time": (Begun(nan, BEGUN.layout, "1", True), WHOLE),
    "a checkpoint of no time": (BEGUN, Whole(inf)),
    "another version's name": (Begun(1.0, "other", "\x1b[31m\n" * 999, True), WHOLE),
    "a time before all": (BEGUN, WHOLE, Sync(-1e300, [], 0, [])),
    "a time after all": (BEGUN, WHOLE, Sync(1e300, [], 0, [])),
    "a negative count": (BEGUN, WHOLE, Sync(3.0, [], -1, [])),
    "an unknown map": (BEGUN, WHOLE, Sync(3.0, [], 0, [Write("none", b"", b"")])),
    "half a key": (BEGUN, WHOLE, Sync(3.0, [], 0, [Write("services", b"1", None)])),
    "an unknown map in a checkpoint": (BEGUN, Entries("none", b"", b""), WHOLE),
    "no compressed bytes": (BEGUN, Entries("slots", b"1", b"1"), WHOLE),
    "half of the compressed bytes": (BEGUN, Entries("slots", compress(b"1234")[:5], b""), WHOLE),
    "more than there is memory": (BEGUN, Entries("slots", compress(b""), zeros(1200)), WHOLE),
}


@pytest.mark.parametrize("records", CRAFTED.values(), ids=CRAFTED)
def test_a_record_that_no_agent_writes(tmp_path: Path, records: tuple[Record, ...]) -> None:
    """The record is named in one line, and an agent's history begins beside it."""
    paths = write(tmp_path, records)
    notes, error = told(paths)
    (line,) = [*notes, *([error] if error else [])][:1]
    assert len(line) < 600 and line.isprintable() and "\n" not in line
    maps = {name: FakeMap(name) for name in RECORDED}
    history = History(paths, maps)  # type: ignore[arg-type]
    history.start()
    history.stop()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_block_of_slots_that_no_map_has(tmp_path: Path) -> None:
    """The endpoints of such a block are not searched for, which would take hours."""
    services = map_sizes.LARGEST["services"]
    written = Write("services", bytes(services.key_size), b"\xff" * services.value_size)
    paths = write(tmp_path, [BEGUN, WHOLE, Sync(3.0, [], 0, [written])])
    assert told(paths) == ([], "")
