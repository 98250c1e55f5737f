# SPDX-License-Identifier: Apache-2.0
"""The kernel's own functions that programs call, and fields of its structs that they read.

bpf/engine/conntrack/kfuncs.h declares them. The compiled bytecode has placeholders: a call of
KFUNC_NUMBERS, a load at an offset that no struct of ours has. ``found`` looks them up in the
running kernel's BTF, ``linked`` puts in what was found, so bytecode in the cache fits every
kernel.

A call of such a function has source register 2, and names the function by its BTF type id. If it is
a module's, the instruction's offset is the place of the module's BTF in the array that is passed
with the program (bpf_attr.fd_array); 0 means vmlinux.
"""

import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, reduce
from pathlib import Path
from typing import NamedTuple

from ebpflb.datapath.maps import layout
from ebpflb.datapath.programs.btf import END, Btf
from ebpflb.datapath.programs.module_btf import open_module_btfs
from ebpflb.errors import NodeError, in_words

BTF = Path("/sys/kernel/btf")
MODULES = ("nf_conntrack", "nf_nat")  # where they are not part of vmlinux

_HEADER = (layout.SOURCES / "engine/conntrack/kfuncs.h").read_text()
_NAMES = re.findall(r"(?m)^KFUNC\([^,]+, (\w+),", _HEADER)
KFUNC_NUMBERS = {name: 0x6B660000 + index for index, name in enumerate(_NAMES)}
_NAMES_OF = {number: name for name, number in KFUNC_NUMBERS.items()}
# Placeholder -> the member that it stands for: struct, then member by member.
_FIELDS: dict[int, tuple[tuple[str, str], ...]] = {
    int(offset, 16): path
    for offset, path in zip(
        re.findall(r"(?m)^FIELD\(\w+, \w+, (0x\w+)\)", _HEADER),
        (
            (("nf_conn", "status"),),
            (("nf_conn", "proto"), ("nf_conntrack_proto", "tcp"), ("ip_ct_tcp", "state")),
            (
                ("nf_conn", "tuplehash"),
                ("nf_conntrack_tuple_hash", END),  # of IP_CT_DIR_ORIGINAL
                ("nf_conntrack_tuple_hash", "tuple"),
                ("nf_conntrack_tuple", "dst"),
                ("nf_inet_addr", END),  # dst is the address, then the port
            ),
        ),
        strict=True,
    )
}
_STRUCTS = {struct for path in _FIELDS.values() for struct, _ in path}
_LOAD, _CALL, _KFUNC_CALL = 1, 0x85, 2  # an instruction's class, an opcode, a source register
_LOAD64 = 0x18


class Kfunc(NamedTuple):
    """``place``: of its module's BTF in fd_array; 0 for vmlinux."""

    place: int
    type_id: int


class Kfuncs(NamedTuple):
    """What the placeholders stand for in the running kernel, and fd_array."""

    calls: Mapping[int, Kfunc]
    offsets: Mapping[int, int]
    fds: tuple[int, ...]


class Linked(NamedTuple):
    """Code without placeholders, and fd_array."""

    code: bytes
    fds: tuple[int, ...]


@contextmanager
def linked(code: bytes) -> Iterator[Linked]:
    """The code as this kernel can load it; nothing is looked up for one without placeholders.

    Raises what ``found`` raises.
    """
    if not any(opcode == _CALL and number in _NAMES_OF for _, opcode, *_, number in _each(code)):
        yield Linked(code, ())
        return
    with found() as functions:
        yield Linked(patch(code, functions), functions.fds)


@contextmanager
def found() -> Iterator[Kfuncs]:
    """What this kernel has; the descriptors are closed afterwards.

    Raises NodeError, with what is missing, and KernelError where a module's BTF may not be opened
    (CAP_SYS_ADMIN).
    """
    modules, calls, offsets = _looked_up(_files())
    fds = _open(modules) if any(call.place for call in calls.values()) else ()
    try:
        yield Kfuncs(calls, offsets, (0, *fds) if fds else ())
    finally:
        for fd in fds:
            os.close(fd)


def are_loaded() -> bool:
    """Whether conntrack and NAT are part of the kernel, or their modules are loaded."""
    try:
        _looked_up(_files())
    except NodeError:
        return False
    return True


def _files() -> tuple[tuple[Path, int], ...]:
    """The files of the BTFs that there are, with their inodes: a module that is loaded again has
    another one.
    """
    found = (BTF / name for name in ("vmlinux", *MODULES))
    return tuple((path, path.stat().st_ino) for path in found if path.exists())


@lru_cache(maxsize=1)
def _looked_up(
    _files: tuple[tuple[Path, int], ...],
) -> tuple[list[str], dict[int, Kfunc], dict[int, int]]:
    """The modules, and what ``Kfuncs`` has; it takes 40 ms, and is the same for every program.

    Raises NodeError.
    """
    read = _read()
    modules = [name for name in read if name != "vmlinux"]
    return modules, _calls(read, modules), _offsets(read)


def patch(code: bytes, kfuncs: Kfuncs) -> bytes:
    """The bytecode with every placeholder replaced."""
    patched = bytearray(code)
    for at, opcode, registers, offset, number in _each(code):
        if opcode == _CALL and not registers >> 4 and number in kfuncs.calls:
            call = kfuncs.calls[number]
            struct.pack_into(
                "<BBhi", patched, at, opcode, _KFUNC_CALL << 4, call.place, call.type_id
            )
        elif opcode & 7 == _LOAD and offset in kfuncs.offsets:
            struct.pack_into("<h", patched, at + 2, kfuncs.offsets[offset])
    return bytes(patched)


def _each(code: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Of each instruction: where it is, opcode, registers, offset, number."""
    at = 0
    while at < len(code):
        yield at, *struct.unpack_from("<BBhi", code, at)
        at += 16 if code[at] == _LOAD64 else 8


def _read() -> dict[str, Btf]:
    """The BTF of vmlinux, and of the modules that are loaded. Raises NodeError."""
    wanted = {*KFUNC_NUMBERS, *_STRUCTS}
    try:
        read = {"vmlinux": Btf((BTF / "vmlinux").read_bytes(), wanted)}
        for name in MODULES:
            if (BTF / name).exists():
                raw = (BTF / name).read_bytes()
                read[name] = Btf(raw, wanted, read["vmlinux"])
    except (OSError, ValueError) as error:
        raise NodeError(f"the kernel's BTF cannot be read in {BTF}: {in_words(error)}") from error
    return read


def _calls(read: Mapping[str, Btf], modules: list[str]) -> dict[int, Kfunc]:
    places = {"vmlinux": 0} | {name: index for index, name in enumerate(modules, start=1)}
    found = {
        name: Kfunc(places[source], type_id)
        for source, btf in read.items()
        for name, type_id in btf.functions.items()
    }
    missing = [name for name in KFUNC_NUMBERS if name not in found]
    if missing:
        raise NodeError(
            f"the kernel has no {missing[0]} for programs (since 6.1, with the modules"
            f" {' and '.join(MODULES)})"
        )
    return {number: found[name] for name, number in KFUNC_NUMBERS.items()}


def _offsets(read: Mapping[str, Btf]) -> dict[int, int]:
    members = reduce(lambda one, btf: btf.members | one, read.values(), dict[str, dict[str, int]]())
    try:
        return {
            placeholder: sum(members[struct][member] for struct, member in path)
            for placeholder, path in _FIELDS.items()
        }
    except KeyError as error:
        raise NodeError(f"the kernel's BTF has no {error.args[0]}") from error


def _open(modules: list[str]) -> tuple[int, ...]:
    """The descriptors of the modules' BTFs, in their order. Raises KernelError or NodeError."""
    opened = open_module_btfs(set(modules))
    if opened.keys() != set(modules):
        for fd in opened.values():
            os.close(fd)
        raise NodeError(f"the BTF of {', '.join(set(modules) - opened.keys())} cannot be opened")
    return tuple(opened[name] for name in modules)
