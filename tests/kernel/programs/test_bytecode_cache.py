# SPDX-License-Identifier: Apache-2.0
"""Bytecode is loaded from the cache only if it is whole, and only root or this user wrote it."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ebpflb.kernel.programs import compiler

PROGRAMS = {"connect4": bytes(16), "connect6": bytes(range(8))}


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    path = tmp_path / "cache" / f"{'a' * 64}{compiler.SUFFIX}"
    compiler.write_cached(path, PROGRAMS)
    return path


def test_what_was_written_is_read(entry: Path) -> None:
    """Every user with read rights gets the bytecode, and no trace of how it was written."""
    assert compiler.read_cached(entry) == PROGRAMS
    assert os.listdir(entry.parent) == [entry.name]
    assert entry.stat().st_mode & 0o777 == 0o644


def flip(entry: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[-1] ^= 1
    entry.write_bytes(content)


def packed_by_others(entry: Path) -> None:
    entry.write_bytes(msgspec.msgpack.encode(PROGRAMS))


def renamed(entry: Path) -> None:
    other = entry.with_name("b" * 64 + compiler.SUFFIX)
    compiler.write_cached(other, {"connect4": bytes(8)})
    other.replace(entry)


def linked(entry: Path) -> None:
    entry.rename(elsewhere := entry.with_name("elsewhere"))
    entry.symlink_to(elsewhere)


def a_pipe(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


def half_an_instruction(entry: Path) -> None:
    compiler.write_cached(entry, {"connect4": bytes(12)})


WRONG: dict[str, Callable[[Path], object]] = {
    "cut short": lambda entry: entry.write_bytes(entry.read_bytes()[:-8]),
    "longer": lambda entry: entry.write_bytes(entry.read_bytes() + bytes(8)),
    "empty": lambda entry: entry.write_bytes(b""),
    "another bit": flip,
    "without a digest": packed_by_others,
    "of another key": renamed,
    "a link": linked,
    "a pipe": a_pipe,
    "half an instruction": half_an_instruction,
    "no program": lambda entry: compiler.write_cached(entry, {"connect4": b""}),
    "writable by all": lambda entry: entry.chmod(0o666),
    "writable by the group": lambda entry: entry.chmod(0o664),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_what_is_not_whole_and_ours_is_no_entry(
    entry: Path, spoil: Callable[[Path], object]
) -> None:
    """It is as if there were none, and a new one takes its place."""
    spoil(entry)
    assert compiler.read_cached(entry) is None
    compiler.write_cached(entry, PROGRAMS)
    assert compiler.read_cached(entry) == PROGRAMS
