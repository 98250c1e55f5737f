# SPDX-License-Identifier: Apache-2.0
"""Bytecode -> programs in the kernel: map numbers are replaced by descriptors, then PROG_LOAD.

A reference to a map, or to the only value of one, is a 64-bit load (opcode 0x18) with source
register 1 or 2; it contains the map's number in maps.h.
"""

import os
import struct
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from msgspec.structs import replace

from ebpflb.errors import KernelError, VerifierError
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.programs import compiler, kernel_places
from ebpflb.kernel.programs.compiler import EXCHANGE, Compiled
from ebpflb.workers import side_by_side

# BPF_PROG_TEST_RUN: run a program of type SCHED_CLS on a packet, without any device.
#
# The kernel (net/bpf/test_run.c) makes an skb of the frame: its protocol is the frame's EtherType,
# its device the one of ``ifindex`` in our network namespace, or loopback. From ``__sk_buff`` it
# takes the fields below and rejects any other that is not zero. A redirect is only returned, not
# done.

PASS, DROP, REDIRECT = 0xFFFFFFFF, 2, 7  # TC_ACT_UNSPEC, _SHOT, _REDIRECT (uapi/linux/pkt_cls.h)

_TEST_RUN, _COMPLETE = 10, 4  # BPF_F_TEST_SKB_CHECKSUM_COMPLETE
_CONTEXTS = 8  # together as large as the whole __sk_buff of any kernel
_GROWTH = 4096  # for data that a program adds to its packet


class Ran(NamedTuple):
    """The result of a run: return value, and the frame, mark and skb->priority afterwards.

    ``nanoseconds`` is the mean time of a run.
    """

    retval: int
    packet: bytes
    nanoseconds: int
    mark: int = 0
    priority: int = 0


def run_program(
    prog_fd: int,
    packet: bytes,
    *,
    repeat: int = 1,
    ifindex: int = 0,
    ingress_ifindex: int = 0,
    mark: int = 0,
    priority: int = 0,
    complete: bool = False,
) -> Ran:
    """Run a program ``repeat`` times on one Ethernet frame of at least 14 bytes.

    From the second run on, the program gets the packet as the run before left it. With ``complete``
    the packet has a checksum of the whole (CHECKSUM_COMPLETE), which the program has to update.

    Raises KernelError: EINVAL for a shorter frame or one longer than about a page, or if the kernel
    does not know ``complete``; ENODEV if there is no such device; EBADMSG for a wrong sum
    afterwards.
    """
    ffi = bpf.ffi
    context = ffi.new("struct skb_context *")
    context.ifindex, context.ingress_ifindex, context.mark = ifindex, ingress_ifindex, mark
    context.priority = priority
    out = bytearray(len(packet) + _GROWTH)
    attr = ffi.new("struct test_run *")
    keep = ffi.from_buffer(packet), ffi.from_buffer(out)
    attr.program, attr.repeat, attr.flags = prog_fd, repeat, _COMPLETE if complete else 0
    attr.size_in, attr.size_out = len(packet), len(out)
    attr.context_in, attr.context_size_in = _at(context), ffi.sizeof(context[0])
    left = ffi.new("struct skb_context[]", _CONTEXTS)
    attr.context_out, attr.context_size_out = _at(left), ffi.sizeof(left)
    setattr(attr, "in", _at(keep[0]))
    attr.out = _at(keep[1])
    bpf.bpf(_TEST_RUN, "running a program on a packet", attr)
    frame, after = bytes(out[: attr.size_out]), left[0]
    return Ran(int(attr.retval), frame, int(attr.duration), int(after.mark), int(after.priority))


def _at(data: object) -> int:
    return int(bpf.ffi.cast("uintptr_t", data))


_LOAD64 = 0x18
_REFERENCES = 1, 2  # BPF_PSEUDO_MAP_FD, BPF_PSEUDO_MAP_VALUE
_LOG_BYTES = 1 << 20
_LOG_LINES = 12


class HookType(NamedTuple):
    """The kernel's numbers for a section: program type and attach type (uapi/linux/bpf.h).

    A packet program is loaded without an attach type, because it is attached by tcx or clsact.
    """

    program_type: int
    attach_type: int


SCHED_CLS, _SOCK, _SOCK_OPS, _SOCK_ADDR, _TRACING = 3, 9, 13, 18, 26  # BPF_PROG_TYPE_...
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
GETSOCKNAME4 = "cgroup/getsockname4"  # used only by netns_cookie.py
_INGRESS = "ingress"  # the program's name
PACKET_SECTIONS = {"tc/ingress": HookType(SCHED_CLS, 0), "tc/egress": HookType(SCHED_CLS, 0)}
SOCK_OPS = "sockops"  # used only by agent/endpoint_health.py
ITER_TCP = "iter/tcp"  # used only by quiet_sockets.py
HOOK_TYPES = {
    **SECTIONS,
    **PACKET_SECTIONS,
    GETSOCKNAME4: HookType(_SOCK_ADDR, 31),
    SOCK_OPS: HookType(_SOCK_OPS, 3),
    ITER_TCP: HookType(_TRACING, 28),
}


class Program(NamedTuple):
    """A loaded program and its section; ``attach_type`` is the section's attach type."""

    name: str
    fd: int
    attach_type: int


def relocate(code: bytes, fds: Mapping[int, int]) -> bytes:
    """Return the bytecode with map numbers replaced by descriptors.

    ``fds`` has 1 for EXCHANGE if the kernel has an atomic compare-and-exchange (``can_exchange``).
    """
    can, patched = fds.get(EXCHANGE, 0), bytearray(code)
    at = 0
    while at < len(patched):
        opcode, registers, _offset, number = struct.unpack_from("<BBhi", patched, at)
        if opcode == _LOAD64 and registers >> 4 in _REFERENCES:
            if number == EXCHANGE:
                patched[at + 1] &= 0x0F  # a plain number
            struct.pack_into("<i", patched, at + 4, can if number == EXCHANGE else fds[number])
        at += 16 if opcode == _LOAD64 else 8
    return _with_exchanges(bytes(patched), _EXCHANGE if can else _COPY * 2)


# compare_exchange in bpf/compat.h. It is compiled as a call, with the arguments in registers 1 to 3
# and the result in register 0. The kernel's instruction (BPF_CMPXCHG) compares with register 0, so
# there are two in place of the call: instructions are shifted, and jumps over them get longer.
_COPY = struct.pack("<BBhi", 0xBF, 2 << 4, 0, 0)  # r0 = r2
_EXCHANGE = _COPY + struct.pack("<BBhi", 0xDB, 3 << 4 | 1, 0, 0xF1)
_CALL, _JUMPS, _NO_JUMPS = 0x85, (5, 6), (0x80, 0x90)  # classes; operations: call, exit


def _with_exchanges(code: bytes, exchange: bytes) -> bytes:
    found = [struct.unpack_from("<BBhi", code, at) for at in range(0, len(code), 8)]
    calls = [at for at, it in enumerate(found) if (it[0], it[3]) == (_CALL, EXCHANGE)]
    if not calls:
        return code
    made = bytearray()
    for at, (opcode, registers, offset, number) in enumerate(found):
        if at in calls:
            made += exchange
            continue
        if opcode & 7 in _JUMPS and opcode & 0xF0 not in _NO_JUMPS:
            offset += bisect_left(calls, at + 1 + offset) - bisect_left(calls, at)
        made += struct.pack("<BBhi", opcode, registers, offset, number)
    return bytes(made)


@cache
def can_exchange() -> bool:
    """Whether the kernel has the instruction (5.12), and compiles it: on arm64 5.18."""
    store = struct.pack("<BBhi", 0x7A, 10, -8, 0), struct.pack("<BBhi", 0xB7, 0, 0, 0)
    exchange = struct.pack("<BBhi", 0xDB, 10, -8, 0xF1)
    code = b"".join([*store, exchange, struct.pack("<BBhi", 0x95, 0, 0, 0)])
    try:
        program = bpf.prog_load(name="probe", program_type=SCHED_CLS, code=code)
    except KernelError:
        return False
    with bpf.closing(program):
        return bool(bpf.info(program, "prog_info").jited_size)


def load(compiled: compiler.Compiled, maps: Mapping[str, Map]) -> list[Program]:
    """Load every program of a source file, as ``load_all`` does."""
    return load_all([compiled], maps)[0]


def load_all(sources: Sequence[compiler.Compiled], maps: Mapping[str, Map]) -> list[list[Program]]:
    """Load every program of these source files in parallel with these maps; all or none.

    Raises VerifierError with the program's name and the log's last lines, or KernelError if the
    kernel rejects it for another reason.
    """
    fds = _by_number(maps)
    each = [(name, compiled) for compiled in sources for name in compiled.programs]
    loaded = iter(
        side_by_side([partial(_load, *which, fds) for which in each], lambda it: os.close(it.fd))
    )
    return [list(islice(loaded, len(compiled.programs))) for compiled in sources]


def load_program(name: str, compiled: compiler.Compiled, maps: Mapping[str, Map]) -> Program:
    """Load one program of a source file, with the errors of ``load_all``."""
    return _load(name, compiled, _by_number(maps))


def _by_number(maps: Mapping[str, Map]) -> dict[int, int]:
    """Return the descriptor of each map by the number that bytecode has for it."""
    numbers = {compiler.MAP_NUMBERS[name]: opened.fd for name, opened in maps.items()}
    return {**numbers, EXCHANGE: can_exchange()}


def _load(name: str, compiled: compiler.Compiled, fds: Mapping[int, int]) -> Program:
    hook = HOOK_TYPES[compiled.sections[name]]
    fd = load_one(name, hook, relocate(compiled.programs[name], fds))
    return Program(name, fd, hook.attach_type)


def load_one(name: str, hook: HookType, code: bytes) -> int:
    """Load one program and return its descriptor; a rejected one is loaded again with a log."""
    try:
        return prog_load(name, hook, code)
    except KernelError as error:
        log = _verifier_log(name, hook, code)
        if not log:
            raise
        raise VerifierError(f"the verifier rejected program {name}: {error}\n{log}") from error


def prog_load(name: str, hook: HookType, code: bytes, **log: Any) -> int:
    """As bpf.prog_load; a program over sockets gets the kernel's own numbers."""
    target = 0
    if hook.program_type == _TRACING:
        places = kernel_places.found()
        code, target = places.put_into(code), places.iterator
    return bpf.prog_load(name=name, code=code, attach_btf=target, **hook._asdict(), **log)


def close(programs: list[Program]) -> None:
    """Close the descriptors; attached programs stay."""
    for program in programs:
        os.close(program.fd)


def _verifier_log(name: str, hook: HookType, code: bytes) -> str:
    log = bytearray(_LOG_BYTES)
    try:
        os.close(prog_load(name, hook, code, log=log))
    except KernelError:
        text = log.split(b"\0", 1)[0].decode(errors="replace").strip()
        return "\n".join(text.splitlines()[-_LOG_LINES:])
    return ""


class FrameProgram:
    """A program that the agent runs on data; it is attached nowhere, and loaded when first needed.

    ``source`` has this program alone; ``cache`` holds compiled bytecode.
    """

    _LINK_HEADER = bytes(14)  # the kernel runs a program on nothing shorter

    def __init__(self, source: str, maps: Mapping[str, Map], cache: Path) -> None:
        self._source, self._maps, self._cache = source, maps, cache
        self._loaded: Program | None = None

    def run(self, data: bytes) -> int:
        """Run it on a frame with the data as payload, and return its result.

        Raises CompileError, VerifierError or KernelError.
        """
        if self._loaded is None:
            compiled = compiler.compile_source(self._source, cache=self._cache)
            (self._loaded,) = load(compiled, self._maps)
        return run_program(self._loaded.fd, self._LINK_HEADER + data).retval

    def close(self) -> None:
        if self._loaded is not None:
            os.close(self._loaded.fd)
            self._loaded = None


class Bytecode(NamedTuple):
    """The socket programs, and the packet programs with and without a link header."""

    sockets: Compiled
    packets: Mapping[bool, Compiled]


def _some(packets: Compiled, *, egress: bool) -> Compiled:
    """Return the programs at ingress alone, or with ``egress`` both."""
    if egress:
        return packets
    return replace(packets, programs={_INGRESS: packets.programs[_INGRESS]})


class ProgramSet:
    """The programs of one variant, loaded with ``maps``.

    Those for packets without a link header are loaded only on request, as is the program at egress
    without ``egress``: few nodes have such a device, and with netfilter nothing wants the latter,
    but the verifier takes as long for them. Raises VerifierError, KernelError or NodeError.
    """

    def __init__(self, code: Bytecode, maps: Mapping[str, Map], *, egress: bool = True) -> None:
        self._code, self.maps = code.packets, maps
        first = _some(code.packets[True], egress=egress)
        with_header, self.sockets = load_all([first, code.sockets], maps)  # slow first
        self._packets, self._lock = {True: with_header}, Lock()

    def packets(self, link_header: bool, *, egress: bool = True) -> list[Program]:
        """Return the program at ingress and, with ``egress``, the one at egress; in any thread."""
        wanted = _some(self._code[link_header], egress=egress)
        with self._lock:
            found = self._packets.setdefault(link_header, [])
            missing = wanted.programs.keys() - {it.name for it in found}
            if missing:
                named = {name: wanted.programs[name] for name in missing}
                found += load(replace(wanted, programs=named), self.maps)
            return [*found]

    @property
    def loaded(self) -> list[Program]:
        return [*self.sockets, *chain.from_iterable(self._packets.values())]

    def close(self) -> None:
        """Close the descriptors; attached programs stay."""
        close(self.loaded)
