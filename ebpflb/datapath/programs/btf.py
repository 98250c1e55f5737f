# SPDX-License-Identifier: Apache-2.0
"""Reads BTF, the kernel's description of its own types (Documentation/bpf/btf.rst)."""

import struct

_MAGIC = 0xEB9F
_HEADER = struct.Struct("<HBBIIIII")
_WORDS = 3  # of struct btf_type: name, info, size or type
_MEMBER = struct.Struct("<III")  # of struct btf_member: name, type, offset
_STRUCT = 4
# What follows a type, by its kind: words, and words for each of its elements (uapi/linux/btf.h).
_KINDS = 32
_AFTER = [{1: 1, 3: 3, 14: 1, 17: 1}.get(kind, 0) for kind in range(_KINDS)]
_FOR_EACH = [{4: 3, 5: 3, 6: 2, 13: 2, 15: 3, 19: 3}.get(kind, 0) for kind in range(_KINDS)]
_OFFSET_BITS = 0xFFFFFF  # of a member's offset; above them its size, if it is a bit field


def read_members(raw: bytes, name: str) -> dict[str, int]:
    """The members of a struct of the kernel, with their offsets in bytes.

    ``raw`` is /sys/kernel/btf/vmlinux. Raises ValueError if it is no BTF or has no such struct.
    """
    if len(raw) < _HEADER.size or int.from_bytes(raw[:2], "little") != _MAGIC:
        raise ValueError("no BTF")
    *_, head, type_at, type_size, string_at, string_size = _HEADER.unpack_from(raw)
    strings = raw[head + string_at : head + string_at + string_size]
    wanted = strings.find(b"\0" + name.encode() + b"\0") + 1
    at = head + type_at
    words = memoryview(raw[at : at + type_size]).cast("I")
    place = 0
    while place < len(words):
        info = words[place + 1]
        kind, elements = info >> 24 & 31, info & 0xFFFF
        if words[place] == wanted and kind == _STRUCT:
            first = at + 4 * (place + _WORDS)
            return _members(raw[first : first + _MEMBER.size * elements], strings)
        place += _WORDS + _AFTER[kind] + _FOR_EACH[kind] * elements
    raise ValueError(f"struct {name}")


def _members(members: bytes, strings: bytes) -> dict[str, int]:
    return {
        strings[at : strings.index(b"\0", at)].decode(): (offset & _OFFSET_BITS) // 8
        for at, _, offset in _MEMBER.iter_unpack(members)
    }
