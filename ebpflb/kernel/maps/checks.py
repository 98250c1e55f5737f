# SPDX-License-Identifier: Apache-2.0
"""The checks by which elements of maps name their keys (bpf/core/check.h)."""

import struct
from operator import mul

from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.layout import MapSpec

_NUMBERS = layout.ffi.typeof("enum check_number").relements
_FACTOR, _FIRST = _NUMBERS["CHECK_FACTOR"], _NUMBERS["CHECK_FIRST"]


class Check:
    """The check in the packed values of one map: a sum over the key and what precedes the check."""

    def __init__(self, spec: MapSpec, place: int) -> None:
        self.place = place
        words = (spec.key_size + place) // 4
        self._words = struct.Struct(f"={words}I")
        self._factors = [pow(_FACTOR, _FIRST + at, 2**64) for at in range(words)]

    def signed(self, key: bytes, value: bytes) -> bytes:
        """The value with the check of its key; without it no program believes it."""
        return value[: self.place] + self._of(key, value) + value[self.place + 4 :]

    def is_right(self, key: bytes, value: bytes) -> bool:
        """Whether a program would believe this value of the key."""
        return self._of(key, value) == value[self.place : self.place + 4]

    def _of(self, key: bytes, value: bytes) -> bytes:
        words = self._words.unpack(key + value[: self.place])
        total: int = sum(map(mul, words, self._factors))
        return (total >> 32 & 0xFFFFFFFF).to_bytes(4, "little")


class NoCheck(Check):
    """Of maps whose elements name nothing: any value is right."""

    def __init__(self) -> None:
        pass

    def signed(self, key: bytes, value: bytes) -> bytes:
        return value

    def is_right(self, key: bytes, value: bytes) -> bool:
        return True


def check_in(spec: MapSpec) -> Check:
    """What signs the values of a map."""
    kind = layout.ffi.typeof(spec.value)
    fields = dict(kind.fields) if kind.kind == "struct" else {}
    return Check(spec, fields["check"].offset) if "check" in fields else NoCheck()
