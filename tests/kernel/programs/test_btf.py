# SPDX-License-Identifier: Apache-2.0
"""Offsets of a struct's members, from BTF that the test makes byte by byte."""

import struct

import pytest

from ebpflb.kernel.programs.loader import read_members

INT, STRUCT, UNION, FUNC, ENUM = 1, 4, 5, 12, 6


class Making:
    """Types in their order."""

    def __init__(self) -> None:
        self.strings = b"\0"
        self.types = b""

    def text(self, name: str) -> int:
        at = len(self.strings)
        self.strings += name.encode() + b"\0"
        return at

    def add(self, kind: int, name: int, after: bytes = b"", elements: int = 0) -> None:
        self.types += struct.pack("<III", name, kind << 24 | elements, 0) + after

    def members(self, kind: int, name: int, *members: tuple[int, int]) -> None:
        after = b"".join(struct.pack("<III", member, 0, bits) for member, bits in members)
        self.add(kind, name, after, len(members))

    def raw(self) -> bytes:
        sizes = 24, 0, len(self.types), len(self.types), len(self.strings)
        return struct.pack("<HBBIIIII", 0xEB9F, 1, 0, *sizes) + self.types + self.strings


@pytest.fixture
def made() -> Making:
    made = Making()
    made.add(INT, made.text("int"), bytes(4))
    made.members(UNION, made.text("proto"), (made.text("tcp"), 0))
    made.add(ENUM, made.text("colours"), bytes(16), elements=2)
    made.add(FUNC, made.text("lookup"))
    return made


def test_offsets_are_in_bytes(made: Making) -> None:
    """Offsets are in bytes, whatever other types come before; a bit field's size does not count."""
    made.members(STRUCT, made.text("task"), (made.text("a"), 64), (made.text("b"), 3 << 24 | 128))
    assert read_members(made.raw(), "task") == {"a": 8, "b": 16}


def test_a_missing_struct_is_a_value_error(made: Making) -> None:
    """A struct that is absent or only declared, and a file that is no BTF, are a ValueError."""
    made.add(7, made.text("task"))
    for raw in (made.raw(), made.raw()[:10], b"\0" * 100):
        with pytest.raises(ValueError, match=r"no BTF|struct task"):
            read_members(raw, "task")
