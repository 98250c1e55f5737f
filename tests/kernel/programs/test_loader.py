# SPDX-License-Identifier: Apache-2.0
"""Bytecode -> programs in the kernel: relocated, verified, all or none."""

import os
import signal
import struct
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.errors import KernelError, VerifierError
from ebpflb.kernel import bpf, probe
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.compiler import MAP_NUMBERS, Compiled
from ebpflb.kernel.programs.loader import PACKET_SECTIONS, SECTIONS, Program
from tests.kernel.variants import needs_root, open_files

LOAD64, EXIT = 0x18, struct.pack("<BBhi", 0x95, 0, 0, 0)
MAP, VALUE = 1, 2  # references: to a map, to the only value of one
STORE_WORDS, ADD_ATOMICALLY, FRAME = 0x7B, 0xDB, 10  # of eight bytes; the register of the stack
CALL, SPIN_LOCK, SPIN_UNLOCK = 0x85, 93, 94  # helpers
OF_SOCKETS = {"assignments", "service_names"}  # ingress asks what a socket has translated
FDS = {number: 3 + index for index, number in enumerate(MAP_NUMBERS.values())}


class Instruction(NamedTuple):
    """One instruction; ``rest`` is the second half of a 64-bit load."""

    opcode: int
    registers: int
    offset: int
    number: int
    rest: bytes

    def packed(self, number: int) -> bytes:
        return struct.pack("<BBhi", self.opcode, self.registers, self.offset, number) + self.rest


short = some.integers(-(2**15), 2**15 - 1)
word = some.integers(-(2**31), 2**31 - 1)
byte = some.integers(0, 255)
target = some.integers(0, 15)
instructions = some.one_of(
    some.builds(
        Instruction, byte.filter(lambda op: op != LOAD64), byte, short, word, some.just(b"")
    ),
    some.builds(
        Instruction,
        some.just(LOAD64),
        byte.filter(lambda registers: registers >> 4 not in (MAP, VALUE)),
        short,
        word,
        some.binary(min_size=8, max_size=8),
    ),
    some.builds(
        Instruction,
        some.just(LOAD64),
        some.builds(
            lambda kind, target: kind << 4 | target, some.sampled_from([MAP, VALUE]), target
        ),
        some.just(0),
        some.sampled_from(list(FDS)),
        some.binary(min_size=8, max_size=8),
    ),
)


@given(code=some.lists(instructions))
def test_relocation(code: list[Instruction]) -> None:
    """Every number of a map becomes its descriptor, and no other bit changes."""
    before = b"".join(i.packed(i.number) for i in code)
    maps = [i.opcode == LOAD64 and i.registers >> 4 in (MAP, VALUE) for i in code]
    after = b"".join(
        i.packed(FDS[i.number] if is_map else i.number)
        for i, is_map in zip(code, maps, strict=True)
    )
    assert loader.relocate(before, FDS) == after


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


def map_ids(fd: int) -> set[int]:
    """The maps that a program refers to, as the kernel has it."""
    ids = bpf.ffi.new("uint32_t[64]")
    out = bpf.ffi.new("struct prog_info *")
    out.map_count, out.maps = 64, int(bpf.ffi.cast("uintptr_t", ids))
    attr = bpf.ffi.new("struct info *")
    attr.fd, attr.size = fd, bpf.ffi.sizeof(out[0])
    attr.out = int(bpf.ffi.cast("uintptr_t", out))
    assert bpf.bpf(bpf.OBJ_GET_INFO, "asking", attr) == 0
    return set(ids[0 : out.map_count])


DECIDING = {
    "services",
    "slots",
    "choices",
    "backend_slots",
    "node_addresses",
    "affinity",
    "source_ranges",
    "cluster_ips",
    "service_ranges",
    "settings",
    "service_stats",
    "verdicts",
    "rotations",
    "backend_loads",
}


@needs_root
@pytest.mark.parametrize("flags", [(), ("-DNO_LINK_HEADER",)], ids=["ethernet", "bare"])
def test_packet_programs(cache: Path, all_maps: dict[str, Map], flags: tuple[str, ...]) -> None:
    """Both variants pass this kernel's verifier as what a device takes, with maps of their own."""
    by_id = {bpf.info(m.fd, "map_info").id: name for name, m in all_maps.items()}
    compiled = compiler.compile_source("hooks/packet.c", flags, cache=cache)
    loaded = loader.load(compiled, all_maps)
    try:
        assert [program.name for program in loaded] == ["ingress", "egress"]
        used = {program.name: {by_id[i] for i in map_ids(program.fd)} for program in loaded}
        assert used["ingress"] >= DECIDING | {"secret"}
        for program in loaded:
            assert bpf.info(program.fd, "prog_info").kind == loader.SCHED_CLS
            assert used[program.name] >= {"tcp_flows", "other_flows", "devices"}
            assert not used[program.name] & OF_SOCKETS
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


@needs_root
def test_maps_of_programs(loaded: list[Program], all_maps: dict[str, Map]) -> None:
    """A program uses the maps that its source names; connect4 all that decide for a socket."""
    by_id = {bpf.info(m.fd, "map_info").id: name for name, m in all_maps.items()}
    used = {program.name: {by_id[i] for i in map_ids(program.fd)} for program in loaded}
    assert used["connect4"] == DECIDING | {
        "socket_places",
        "sockets",
        "sockets_full",
        "assignments",
        "peers",
        "backend_stats",
        "own_addresses",
        "connections",
        "no_frontends",
    }
    counted = {"verdicts"} if probe.set_retval() else set()
    assert used["post_bind4"] == {"settings", "services", "node_addresses"} | counted
    assert used["getpeername6"] == {
        "socket_places",
        "sockets",
        "sockets_full",
        "peers",
        "verdicts",
    }


def test_sockets_are_counted_atomically(compiled: Compiled) -> None:
    """A program that is interrupted loses no count: the one that only counts writes to no map by a
    plain store, except to a place that it has locked. From what is counted the agent knows whether
    a backend may have open sockets.
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
    """The hooks, the last of which does not pass."""
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
    """If the verifier's log is empty the error is the kernel's."""
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
        unknown_map = Instruction(LOAD64, MAP << 4, 0, 1, bytes(8)).packed(1)
        bad = broken(one_variant, EXIT if failure == "verifier" else unknown_map)
    before = open_files()
    with pytest.raises((VerifierError, KeyError)):
        loader.load(bad, all_maps)
    assert open_files() == before


@needs_root
def test_closed(one_variant: Compiled, all_maps: dict[str, Map]) -> None:
    """Loading and closing leaves no descriptor behind."""
    before = open_files()
    loader.close(loader.load(one_variant, all_maps))
    assert open_files() == before


def test_sections_of_the_source() -> None:
    """Every section that a program claims is one that the loader knows."""
    assert set(compiler.sections("hooks/socket.c").values()) == set(SECTIONS)
    assert set(compiler.sections("hooks/packet.c").values()) == set(PACKET_SECTIONS)
