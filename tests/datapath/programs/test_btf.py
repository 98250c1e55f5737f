# SPDX-License-Identifier: Apache-2.0
"""Type ids of functions and offsets of members, from BTF that is made here byte by byte."""

import struct

import pytest

from ebpflb.datapath.programs.btf import END, Btf

INT, STRUCT, UNION, FUNC, ENUM = 1, 4, 5, 12, 6


class Making:
    """Types in their order: each has the next id."""

    def __init__(self, first_string: int = 0) -> None:
        self.first_string = first_string
        self.strings = b"\0"
        self.types = b""

    def text(self, name: str) -> int:
        at = self.first_string + len(self.strings)
        self.strings += name.encode() + b"\0"
        return at

    def add(
        self, kind: int, name: int, after: bytes = b"", elements: int = 0, size: int = 0
    ) -> None:
        self.types += struct.pack("<III", name, kind << 24 | elements, size) + after

    def members(self, kind: int, name: int, *members: tuple[int, int], size: int) -> None:
        after = b"".join(struct.pack("<III", member, 0, bits) for member, bits in members)
        self.add(kind, name, after, len(members), size)

    def raw(self) -> bytes:
        sizes = 24, 0, len(self.types), len(self.types), len(self.strings)
        return struct.pack("<HBBIIIII", 0xEB9F, 1, 0, *sizes) + self.types + self.strings


@pytest.fixture
def base() -> Making:
    made = Making()
    made.add(INT, made.text("int"), bytes(4))
    made.members(UNION, made.text("proto"), (made.text("tcp"), 0), size=12)
    made.add(ENUM, made.text("colours"), bytes(16), elements=2)
    made.add(FUNC, made.text("lookup"))
    return made


def test_function(base: Making) -> None:
    """Its id counts every type before it, whatever follows their heads."""
    assert Btf(base.raw(), {"lookup", "absent"}).functions == {"lookup": 4}


def test_members(base: Making) -> None:
    """In bytes, by name, and the size; a bit field's size is no part of its offset."""
    members = (base.text("a"), 64), (base.text("b"), 3 << 24 | 128)
    base.members(STRUCT, base.text("conn"), *members, size=24)
    read = Btf(base.raw(), {"conn", "proto"})
    assert read.members == {"conn": {"a": 8, "b": 16, END: 24}, "proto": {"tcp": 0, END: 12}}


def test_module(base: Making) -> None:
    """A module's ids and strings go on where those of vmlinux end, and it may use its strings."""
    vmlinux = Btf(base.raw(), {"lookup", "proto"})
    module = Making(first_string=vmlinux.end_of_strings)
    module.add(INT, module.text("own"), bytes(4))
    proto_of_vmlinux = base.strings.index(b"proto")
    module.members(STRUCT, proto_of_vmlinux, (module.text("udp"), 32), size=8)
    module.add(FUNC, module.text("insert"))
    read = Btf(module.raw(), {"insert"}, vmlinux)
    assert read.functions == {"insert": 7}
    assert read.members == {"proto": {"udp": 4, END: 8}}


def test_only_declared(base: Making) -> None:
    """A declaration without members is no struct to read."""
    base.add(7, base.text("conn"))
    assert Btf(base.raw(), {"conn"}).members == {}


@pytest.mark.parametrize("raw", [b"", b"\x7fELF", bytes(64)])
def test_no_btf(raw: bytes) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError, match="no BTF"):
        Btf(raw, ())
