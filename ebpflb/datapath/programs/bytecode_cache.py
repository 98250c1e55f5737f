# SPDX-License-Identifier: Apache-2.0
"""Compiled bytecode in files, each named by the hash of what it was compiled from.

    32 bytes    SHA-256 of the file's name and of the rest
    the rest    msgpack {program: bytecode}

What is loaded into the kernel must be what was compiled: an entry counts only if its digest fits,
and if nobody but root and this user could have written it. Any other one is compiled anew.
"""

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from ebpflb import files, regular_file

SUFFIX = ".msgpack"
_DIGEST = hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST = 16 << 20  # bytes; an entry has a tenth of a megabyte
_INSTRUCTION = 8  # bytes


def read(entry: Path) -> dict[str, bytes] | None:
    """Bytecode by program name; None if there is no such entry, or not a whole one of ours."""
    try:
        return _programs(entry, _content(entry))
    except (OSError, ValueError, RecursionError, regular_file.UnusableFile):
        return None


def write(entry: Path, programs: dict[str, bytes]) -> None:
    """If the cache cannot be written, the next start compiles again, for a second."""
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        packed = msgspec.msgpack.encode(programs)
        files.replace(entry, _digest(entry, packed) + packed, mode=0o644)


def _content(entry: Path) -> bytes:
    with regular_file.opened(entry, _MOST, follow=False) as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & _OTHERS_MAY_WRITE:
            raise ValueError("others may have written it")
        return file.read(_MOST)


def _programs(entry: Path, content: bytes) -> dict[str, bytes]:
    digest, packed = content[:_DIGEST], content[_DIGEST:]
    if digest != _digest(entry, packed):
        raise ValueError("another content")
    programs = msgspec.msgpack.decode(packed, type=dict[str, bytes])
    if not all(code and len(code) % _INSTRUCTION == 0 for code in programs.values()):
        raise ValueError("not whole instructions")
    return programs


def _digest(entry: Path, packed: bytes) -> bytes:
    return hashlib.sha256(entry.name.encode() + b"\0" + packed).digest()
