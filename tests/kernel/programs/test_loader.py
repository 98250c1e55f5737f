# SPDX-License-Identifier: Apache-2.0
"""Bytecode becomes programs in the kernel: relocated, verified, all or none."""

import os
import signal
import struct
from pathlib import Path

import pytest

from ebpflb.errors import KernelError, VerifierError
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.compiler import EXCHANGE, MAP_NUMBERS, Compiled
from ebpflb.kernel.programs.loader import PACKET_SECTIONS, SECTIONS
from tests.kernel.variants import needs_root, open_files

LOAD64, EXIT = 0x18, struct.pack("<BBhi", 0x95, 0, 0, 0)
MAP = 1  # a reference to a map
STORE_WORDS, ADD_ATOMICALLY, FRAME = 0x7B, 0xDB, 10  # of eight bytes; the register of the stack
CALL, SPIN_LOCK, SPIN_UNLOCK = 0x85, 93, 94  # helpers


@needs_root
def test_all_load(compiled: Compiled, all_maps: dict[str, Map]) -> None:
    """Every program of both variants passes this kernel's verifier, under its own name."""
    loaded = loader.load(compiled, all_maps)
    try:
        assert [program.name for program in loaded] == list(compiled.programs)
        for program in loaded:
            info = bpf.info(program.fd, "prog_info")
            assert bpf.ffi.string(info.name).decode() == program.name[:15]
            attach = SECTIONS[compiled.sections[program.name]]
            assert (info.kind, program.attach_type) == attach
    finally:
        loader.close(loaded)


@needs_root
def test_a_signal_during_verification(cache: Path, all_maps: dict[str, Map]) -> None:
    """The verifier gives up with EAGAIN when a signal arrives; the program is loaded again."""
    compiled = compiler.compile_source("hooks/packet.c", cache=cache)
    fds = {MAP_NUMBERS[name]: opened.fd for name, opened in all_maps.items()}
    code = loader.relocate(compiled.programs["ingress"], fds)
    hook = loader.HOOK_TYPES[compiled.sections["ingress"]]
    former = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        for seconds in (0.005, 0.015, 0.025):  # verification takes longer than each of these
            signal.setitimer(signal.ITIMER_REAL, seconds)
            os.close(loader.load_one("ingress", hook, code))
    finally:
        signal.signal(signal.SIGALRM, former)


def instruction(opcode: int, registers: int = 0, offset: int = 0, number: int = 0) -> bytes:
    return struct.pack("<BBhi", opcode, registers, offset, number)


EXCHANGING = b"".join(
    (
        instruction(0x18, 1 << 4 | 6, number=EXCHANGE) + bytes(8),  # r6 = CAN_EXCHANGE
        instruction(0x7A, 10, -8, 5),  # the value is 5
        instruction(0xBF, 10 << 4 | 1) + instruction(0x07, 1, number=-8),  # r1 = its address
        instruction(0xB7, 2, number=5) + instruction(0xB7, 3, number=7),  # r2 = 5, r3 = 7
        instruction(0x15, 6, 3),  # without the instruction: to the end
        instruction(CALL, number=EXCHANGE),
        instruction(0x55, 0, 1, 5),  # r0 is what it was: 5
        instruction(0x05, 0, 0),
        instruction(0x79, 10 << 4, -8) + instruction(0x95),  # return the value
    )
)


@needs_root
@pytest.mark.parametrize("can", [False, True])
def test_a_value_is_exchanged(can: bool) -> None:
    """The call becomes the kernel's instruction; without it the call is jumped over."""
    code = loader.relocate(EXCHANGING, {EXCHANGE: can and loader.can_exchange()})
    program = loader.load_one("exchange", loader.HOOK_TYPES["tc/ingress"], code)
    with bpf.closing(program):
        ran = loader.run_program(program, bytes(64))
    assert ran.retval == (7 if can and loader.can_exchange() else 5)


def targets(code: bytes) -> dict[int, int]:
    """Return where each jump leads, by index; a call of EXCHANGE counts as it will be."""
    at, jumps, indices = 0, list[tuple[int, int]](), list[int]()
    for place in range(0, len(code), 8):
        opcode, _, offset, number = struct.unpack_from("<BBhi", code, place)
        indices.append(at)
        at += 2 if (opcode, number) == (CALL, EXCHANGE) else 1
        if opcode & 7 in (5, 6) and opcode & 0xF0 not in (0x80, 0x90):
            jumps.append((place // 8, place // 8 + 1 + offset))
    return {indices[jump]: indices[target] for jump, target in jumps}


def test_jumps_over_an_exchange(compiled: Compiled) -> None:
    """Each jump leads to the same instruction as before."""
    code, fds = compiled.programs["connect4"], dict.fromkeys(MAP_NUMBERS.values(), 3)
    assert code.count(instruction(CALL, number=EXCHANGE)) >= 2
    assert targets(loader.relocate(code, {**fds, EXCHANGE: 1})) == targets(code)


def test_sockets_are_counted_atomically(compiled: Compiled) -> None:
    """An interrupted program loses no count: the counting program has no plain store to a map,
    except to a place that it has locked. From the counts the agent knows whether a backend may have
    open sockets.
    """
    code, is_locked, stores = compiled.programs["sock_release"], False, list[tuple[int, int]]()
    for at in range(0, len(code), 8):
        called = struct.unpack_from("=i", code, at + 4)[0] if code[at] == CALL else 0
        is_locked = called == SPIN_LOCK or (is_locked and called != SPIN_UNLOCK)
        stores += [] if is_locked else [(code[at], code[at + 1] & 15)]
    assert (STORE_WORDS, FRAME) in stores
    assert not any(op == STORE_WORDS and target != FRAME for op, target in stores)
    assert any(op == ADD_ATOMICALLY for op, _ in stores)


def broken(good: Compiled, code: bytes) -> Compiled:
    """Return hooks of which the last one cannot be loaded."""
    return Compiled(good.programs | {"sock_release": code}, good.sections, cached=False)


@needs_root
def test_verifier_refuses(one_variant: Compiled, all_maps: dict[str, Map]) -> None:
    """The error names the program and ends with the last lines of the verifier's log."""
    filler = struct.pack("<BBhi", 0xB7, 1, 0, 0) * 40
    with pytest.raises(VerifierError) as refusal:
        loader.load(broken(one_variant, filler + EXIT), all_maps)
    first, *log = str(refusal.value).splitlines()
    assert first == "the verifier rejected program sock_release: loading program sock_release: " + (
        "Permission denied"
    )
    assert "R0 !read_ok" in log
    assert len(log) <= 12


@needs_root
def test_kernel_refuses(all_maps: dict[str, Map]) -> None:
    """If the verifier's log is empty, the error is the kernel's."""
    code = struct.pack("<BBhi", 0xB7, 0, 0, 1) + EXIT
    with pytest.raises(KernelError, match="loading program x: Invalid argument"):
        loader.load_one("x", loader.HookType(18, 12), code)


@needs_root
@pytest.mark.parametrize("failure", ["verifier", "relocation", "section"])
def test_all_or_none(one_variant: Compiled, all_maps: dict[str, Map], failure: str) -> None:
    """If one program cannot be loaded, none is."""
    if failure == "section":
        sections = one_variant.sections | {"sock_release": "cgroup/nothing"}
        bad = Compiled(one_variant.programs, sections, cached=False)
    else:
        unknown_map = struct.pack("<BBhi8x", LOAD64, MAP << 4, 0, 1)
        bad = broken(one_variant, EXIT if failure == "verifier" else unknown_map)
    before = open_files()
    with pytest.raises((VerifierError, KeyError)):
        loader.load(bad, all_maps)
    assert open_files() == before


def test_sections_of_the_source() -> None:
    """Every section that a program claims is one that the loader knows."""
    assert set(compiler.sections("hooks/socket.c").values()) == set(SECTIONS)
    assert set(compiler.sections("hooks/packet.c").values()) == set(PACKET_SECTIONS)
