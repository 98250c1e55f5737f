# SPDX-License-Identifier: Apache-2.0
"""Bytecode -> programs in the kernel: map numbers are replaced by descriptors, then PROG_LOAD.

A reference to a map is a 64-bit load (opcode 0x18) with source register 1; it contains the map's
number in maps.h.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from ebpflb.datapath import kernel
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.programs import compiler
from ebpflb.datapath.side_by_side import side_by_side
from ebpflb.errors import KernelError, VerifierError

_LOAD64, _MAP_REFERENCE = 0x18, 1
_LOG_BYTES = 1 << 20
_LOG_LINES = 12


class HookType(NamedTuple):
    """The kernel's numbers for a section: program type and attach type (uapi/linux/bpf.h).

    A packet program is loaded without an attach type: it goes to tcx and to clsact alike.
    """

    program_type: int
    attach_type: int


SCHED_CLS, _SOCK, _SOCK_ADDR = 3, 9, 18  # BPF_PROG_TYPE_SCHED_CLS, _CGROUP_SOCK, ...
SECTIONS = {
    "cgroup/connect4": HookType(_SOCK_ADDR, 10),
    "cgroup/connect6": HookType(_SOCK_ADDR, 11),
    "cgroup/post_bind4": HookType(_SOCK, 12),
    "cgroup/post_bind6": HookType(_SOCK, 13),
    "cgroup/sendmsg4": HookType(_SOCK_ADDR, 14),
    "cgroup/sendmsg6": HookType(_SOCK_ADDR, 15),
    "cgroup/recvmsg4": HookType(_SOCK_ADDR, 19),
    "cgroup/recvmsg6": HookType(_SOCK_ADDR, 20),
    "cgroup/getpeername4": HookType(_SOCK_ADDR, 29),
    "cgroup/getpeername6": HookType(_SOCK_ADDR, 30),
    "cgroup/sock_release": HookType(_SOCK, 34),
}
GETSOCKNAME4 = "cgroup/getsockname4"  # only used by netns_cookie.py
PACKET_SECTIONS = {"tc/ingress": HookType(SCHED_CLS, 0), "tc/egress": HookType(SCHED_CLS, 0)}
HOOK_TYPES = {**SECTIONS, **PACKET_SECTIONS, GETSOCKNAME4: HookType(_SOCK_ADDR, 31)}


class Program(NamedTuple):
    """A loaded program and its section; ``attach_type`` is the section's attach type."""

    name: str
    fd: int
    attach_type: int


def relocate(code: bytes, fds: Mapping[int, int]) -> bytes:
    """The bytecode with map numbers replaced by descriptors."""
    patched = bytearray(code)
    at = 0
    while at < len(patched):
        opcode, registers, _offset, number = struct.unpack_from("<BBhi", patched, at)
        if opcode == _LOAD64 and registers >> 4 == _MAP_REFERENCE:
            struct.pack_into("<i", patched, at + 4, fds[number])
        at += 16 if opcode == _LOAD64 else 8
    return bytes(patched)


def load(compiled: compiler.Compiled, maps: Mapping[str, Map]) -> list[Program]:
    """Every program of a source file, as ``load_all`` does."""
    return load_all([compiled], maps)[0]


def load_all(sources: Sequence[compiler.Compiled], maps: Mapping[str, Map]) -> list[list[Program]]:
    """Every program of these source files, loaded side by side with these maps; all or none.

    Raises VerifierError with the program's name and the log's last lines, or KernelError if the
    kernel rejects it for another reason.
    """
    fds = {compiler.MAP_NUMBERS[name]: opened.fd for name, opened in maps.items()}
    each = [(name, compiled) for compiled in sources for name in compiled.programs]
    loaded = iter(
        side_by_side([partial(_load, *which, fds) for which in each], lambda it: os.close(it.fd))
    )
    return [list(islice(loaded, len(compiled.programs))) for compiled in sources]


def _load(name: str, compiled: compiler.Compiled, fds: Mapping[int, int]) -> Program:
    hook = HOOK_TYPES[compiled.sections[name]]
    fd = load_one(name, hook, relocate(compiled.programs[name], fds))
    return Program(name, fd, hook.attach_type)


def load_one(name: str, hook: HookType, code: bytes) -> int:
    """One program's descriptor; loads again with the verifier's log if it is rejected."""
    try:
        return _prog_load(name, hook, code)
    except KernelError as error:
        log = _verifier_log(name, hook, code)
        if not log:
            raise
        raise VerifierError(f"the verifier rejected program {name}: {error}\n{log}") from error


def close(programs: list[Program]) -> None:
    """Closes the descriptors; attached programs stay."""
    for program in programs:
        os.close(program.fd)


def _prog_load(name: str, hook: HookType, code: bytes, log: bytearray | None = None) -> int:
    return kernel.prog_load(
        name=name,
        program_type=hook.program_type,
        attach_type=hook.attach_type,
        code=code,
        log=log,
    )


def _verifier_log(name: str, hook: HookType, code: bytes) -> str:
    log = bytearray(_LOG_BYTES)
    try:
        os.close(_prog_load(name, hook, code, log))
    except KernelError:
        text = log.split(b"\0", 1)[0].decode(errors="replace").strip()
        return "\n".join(text.splitlines()[-_LOG_LINES:])
    return ""
