# SPDX-License-Identifier: Apache-2.0
"""What a program over the kernel's TCP sockets calls and reads, in the running kernel's numbers.

bpf/layout/quiet_socket.h has a number for each; the program's bytecode has it in a 64-bit load
(opcode 0x18) or a call (0x85), where it is replaced before the program is loaded.
"""

import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import NodeError, in_words
from ebpflb.kernel.maps.layout import names

_SOCK = "inet_conn.icsk_inet.sk."
_FIELDS = {  # of struct tcp_sock
    "state": f"{_SOCK}__sk_common.skc_state",
    "write_seq": "write_seq",
    "snd_una": "snd_una",
    "rcv_nxt": "rcv_nxt",
    "copied_seq": "copied_seq",
    "snd_wl1": "snd_wl1",
    "lsndtime": "lsndtime",
    "lrcvtime": "inet_conn.icsk_ack.lrcvtime",
    "backlog": f"{_SOCK}sk_backlog.head",
    "out_of_order": "out_of_order_queue",
    "user_data": f"{_SOCK}sk_user_data",
    "ulp_ops": "inet_conn.icsk_ulp_ops",
}
_DESTROY, _ITERATOR, _TCP_SOCK = "bpf_sock_destroy", "bpf_iter_tcp", "tcp_sock"
_LOAD64, _CALL, _OF_THE_KERNEL = 0x18, 0x85, 2 << 4  # BPF_PSEUDO_KFUNC_CALL, as source register


class KernelPlaces(NamedTuple):
    """``iterator``: the kernel's function that goes through TCP sockets; ``destroy``: ends one."""

    iterator: int
    destroy: int
    fields: Mapping[int, int]  # number in bytecode -> byte of struct tcp_sock

    def put_into(self, code: bytes) -> bytes:
        """Return the bytecode with the kernel's numbers."""
        patched, at = bytearray(code), 0
        while at < len(patched):
            opcode, registers, _, number = struct.unpack_from("<BBhi", patched, at)
            if opcode == _LOAD64 and not registers >> 4 and number in self.fields:
                struct.pack_into("<i", patched, at + 4, self.fields[number])
            elif opcode == _CALL and _NUMBERS.get(number) == "sock_destroy":
                struct.pack_into("<BBhi", patched, at, _CALL, _OF_THE_KERNEL, 0, self.destroy)
            at += 16 if opcode == _LOAD64 else 8
        return bytes(patched)


_NUMBERS = names("kernel_place", "KERNEL_")


@cache
def found() -> KernelPlaces:
    """Return the running kernel's places. Raises NodeError if it lacks one (before 6.5)."""
    types = KernelTypes({_DESTROY, _ITERATOR}, {_TCP_SOCK})
    fields = {
        number: types.place(_TCP_SOCK, _FIELDS[name])
        for number, name in _NUMBERS.items()
        if name in _FIELDS
    }
    return KernelPlaces(types.function(_ITERATOR), types.function(_DESTROY), fields)


# The running kernel's types (Documentation/bpf/btf.rst): numbers of functions, places of fields.
#
# The description has 5 MB and 130,000 types; reading it takes 0.1 s: only a feature in use reads
# it.

VMLINUX = Path("/sys/kernel/btf/vmlinux")
_HEADER = struct.Struct("=HBBIIIII")
_TYPE = struct.Struct("=III")  # name, info, size or type
_MEMBER = struct.Struct("=III")  # name, type, place in bits
_STRUCT, _UNION, _FUNCTION = 4, 5, 12
_QUALIFIERS = {8, 9, 10, 11, 18}  # typedef, volatile, const, restrict, type tag
# Bytes behind a type: once, and for each of its members.
_ONCE = {1: 4, 3: 12, 14: 4, 17: 4}
_EACH = {_STRUCT: 12, _UNION: 12, 6: 8, 13: 8, 15: 12, 19: 12}


class _Type(NamedTuple):
    name: int
    kind: int
    members: int
    target: int  # its size, or the type that it refers to
    is_packed: bool  # members contain the sizes of their bit fields


class KernelTypes:
    """``functions`` and ``structs`` are the only names that can be asked for."""

    def __init__(self, functions: set[str], structs: set[str], path: Path = VMLINUX) -> None:
        """Raises NodeError if the kernel does not describe itself."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise NodeError(f"the kernel's types cannot be read: {in_words(error)}") from error
        _, _, _, size, types, length, strings, _ = _HEADER.unpack_from(data)
        self._strings, self._types = data[size + strings :], data[size + types :][:length]
        wanted = {self._name(each): (_FUNCTION, each) for each in functions}
        wanted |= {self._name(each): (_STRUCT, each) for each in structs}
        self._at, self._found = [0], dict[tuple[int, str], int]()
        at = 0
        while at < length:
            name, info, _ = _TYPE.unpack_from(self._types, at)
            kind = info >> 24 & 31
            if name in wanted and wanted[name][0] == kind:
                self._found[wanted[name]] = len(self._at)
            self._at.append(at)
            at += _TYPE.size + _ONCE.get(kind, 0) + _EACH.get(kind, 0) * (info & 0xFFFF)

    def function(self, name: str) -> int:
        """Return the number of a function. Raises NodeError if the kernel does not have it."""
        return self._get(_FUNCTION, name)

    def place(self, kind: str, field: str) -> int:
        """Return at which byte of a struct a field is; its parts are separated by points.

        Raises NodeError if the kernel has no such field.
        """
        found, place = self._get(_STRUCT, kind), 0
        for part in field.split("."):
            member = self._member(found, self._name(part))
            if member is None:
                raise NodeError(f"the kernel's struct {kind} has no field {field}")
            found, place = member[0], place + member[1]
        return place // 8

    def _get(self, kind: int, name: str) -> int:
        if (kind, name) not in self._found:
            raise NodeError(f"this kernel has no {name}")
        return self._found[kind, name]

    def _name(self, text: str) -> int:
        """Return the place of a name among the strings; -1 if there is none."""
        at = self._strings.find(b"\0" + text.encode() + b"\0")
        return at + 1 if at >= 0 else -1

    def _type(self, number: int) -> _Type:
        name, info, target = _TYPE.unpack_from(self._types, self._at[number])
        return _Type(name, info >> 24 & 31, info & 0xFFFF, target, bool(info >> 31))

    def _member(self, number: int, name: int) -> tuple[int, int] | None:
        """Return type and place, in bits, of a member, also one of a nameless member's."""
        for own, kind, place in self._members(number):
            if own == name:
                return kind, place
            inner = None if own else self._member(kind, name)
            if inner:
                return inner[0], place + inner[1]
        return None

    def _members(self, number: int) -> Iterator[tuple[int, int, int]]:
        found = self._type(number)
        while found.kind in _QUALIFIERS:
            number, found = found.target, self._type(found.target)
        if found.kind not in (_STRUCT, _UNION):
            return
        first = self._at[number] + _TYPE.size
        for index in range(found.members):
            name, kind, place = _MEMBER.unpack_from(self._types, first + index * _MEMBER.size)
            yield name, kind, place & 0xFFFFFF if found.is_packed else place
