# SPDX-License-Identifier: Apache-2.0
"""Reads BTF, the kernel's description of its own types (Documentation/bpf/btf.rst).

Only what the loader asks for is kept: the type ids of some functions, and where the members of some
structs lie. A module's BTF continues that of vmlinux: its type ids and string offsets begin where
those of its base end.
"""

import struct
from collections.abc import Collection

END = "}"  # the name of no member: where the struct ends, which is its size

_MAGIC = 0xEB9F
_HEADER = struct.Struct("<HBBIIIII")
_TYPE = struct.Struct("<III")  # of struct btf_type: name, info, size or type
_STRUCT, _UNION, _FUNC = 4, 5, 12
# What follows a type, by its kind: words, and words for each of its elements (uapi/linux/btf.h).
_KINDS = 32
_AFTER = [{1: 1, 3: 3, 14: 1, 17: 1}.get(kind, 0) for kind in range(_KINDS)]
_FOR_EACH = [{4: 3, 5: 3, 6: 2, 13: 2, 15: 3, 19: 3}.get(kind, 0) for kind in range(_KINDS)]
_OFFSET_BITS = 0xFFFFFF  # of a member's offset; above them its size, if it is a bit field


class Btf:
    """``functions``: name -> type id. ``members``: name of a struct or union -> member, or END ->
    byte offset. Both hold only names of ``wanted``; structs that are only declared are missing.
    """

    def __init__(self, raw: bytes, wanted: Collection[str], base: "Btf | None" = None) -> None:
        """``raw`` is a file of /sys/kernel/btf. Raises ValueError if it is no BTF."""
        if len(raw) < _HEADER.size or int.from_bytes(raw[:2], "little") != _MAGIC:
            raise ValueError("no BTF")
        *_, head, type_at, type_size, string_at, string_size = _HEADER.unpack_from(raw)
        self._base = base
        self._first_string = base.end_of_strings if base else 0
        self._strings = raw[head + string_at : head + string_at + string_size]
        self.end_of_strings: int = self._first_string + string_size
        self.functions: dict[str, int] = {}
        self.members: dict[str, dict[str, int]] = {}
        self._names: dict[int, str] = {**(base._names if base else {}), **self._find(wanted)}
        self.end_of_types = self._read(raw, head + type_at, type_size, base)

    def _find(self, wanted: Collection[str]) -> dict[int, str]:
        """Offset of the string -> name."""
        found = {}
        for name in wanted:
            at = self._strings.find(b"\0" + name.encode() + b"\0")
            if at >= 0:
                found[self._first_string + at + 1] = name
        return found

    def _read(self, raw: bytes, at: int, size: int, base: "Btf | None") -> int:
        """The types are some 100,000, of different lengths: most of this is to find the next."""
        number, place, names = base.end_of_types if base else 1, 0, self._names
        words = memoryview(raw[at : at + size]).cast("I")
        while place < len(words):
            info = words[place + 1]
            kind, elements = info >> 24 & 31, info & 0xFFFF
            if words[place] in names:
                after = at + 4 * place + _TYPE.size
                self._take(names[words[place]], kind, number, raw, after, elements)
            place += 3 + _AFTER[kind] + _FOR_EACH[kind] * elements
            number += 1
        return number

    def _take(self, name: str, kind: int, number: int, raw: bytes, at: int, elements: int) -> None:
        """A type whose elements are at this offset."""
        if kind == _FUNC:
            self.functions[name] = number
        elif kind in (_STRUCT, _UNION):
            found = (_TYPE.unpack_from(raw, at + 12 * index) for index in range(elements))
            self.members[name] = {
                self._text(member): (offset & _OFFSET_BITS) // 8 for member, _, offset in found
            }
            *_, self.members[name][END] = _TYPE.unpack_from(raw, at - _TYPE.size)

    def _text(self, offset: int) -> str:
        if offset < self._first_string and self._base:
            return self._base._text(offset)
        start = offset - self._first_string
        return self._strings[start : self._strings.index(b"\0", start)].decode()
