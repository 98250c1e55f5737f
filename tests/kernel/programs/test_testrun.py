# SPDX-License-Identifier: Apache-2.0
"""A program is run on a packet: what it returns, reads and writes."""

import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.programs.loader import run_program
from tests.kernel.variants import needs_root
from tests.packet.node import knows_ingress_device

pytestmark = needs_root

SCHED_CLS = 3
FRAME = bytes(range(64))
LOAD, STORE, ADD, MOVE, EXIT = 0x61, 0x63, 0x07, 0xB7, 0x95
CONTEXT = {"len": 0, "mark": 8, "protocol": 16, "ingress_ifindex": 36, "ifindex": 40}

Loader = Callable[..., int]


def instruction(opcode: int, registers: int, offset: int = 0, number: int = 0) -> bytes:
    return struct.pack("<BBhi", opcode, registers, offset, number)


@pytest.fixture
def load() -> Iterator[Loader]:
    made: list[int] = []

    def loader(*code: bytes) -> int:
        whole = b"".join((*code, instruction(EXIT, 0)))
        made.append(
            bpf.prog_load(name="test", program_type=SCHED_CLS, attach_type=0, code=whole, log=None)
        )
        return made[-1]

    yield loader
    for fd in made:
        os.close(fd)


@pytest.mark.parametrize(
    ("field", "value"), [("len", 64), ("mark", 7), ("ingress_ifindex", 77), ("ifindex", 1)]
)
def test_context(load: Loader, field: str, value: int) -> None:
    """The program reads the fields that the caller has set."""
    program = load(instruction(LOAD, 0x10, CONTEXT[field]))
    if field == "ingress_ifindex" and not knows_ingress_device():
        pytest.skip("a run is told no way in")
    told: dict[str, Any] = {"ifindex": 1} | ({} if field == "len" else {field: value})
    assert run_program(program, FRAME, **told).retval == value


@pytest.mark.parametrize("kind", [0x0800, 0x86DD, 0x8100])
def test_protocol(load: Loader, kind: int) -> None:
    """The protocol is the frame's own type."""
    program = load(instruction(LOAD, 0x10, CONTEXT["protocol"]))
    frame = bytes(12) + kind.to_bytes(2, "big") + bytes(60)
    assert run_program(program, frame).retval.to_bytes(2, "little") == kind.to_bytes(2, "big")


def test_repeat(load: Loader) -> None:
    """A program that runs often finds the packet as it left it itself."""
    mark = CONTEXT["mark"]
    one_more = instruction(LOAD, 0x10, mark), instruction(ADD, 0, number=1)
    program = load(*one_more, instruction(STORE, 0x01, mark))
    assert run_program(program, FRAME, mark=5, repeat=1000).retval == 1005


def test_refused(load: Loader) -> None:
    """Half a frame, and a missing device, are errors."""
    program = load(instruction(MOVE, 0, number=-1))
    with pytest.raises(KernelError, match="running a program on a packet: Invalid argument"):
        run_program(program, bytes(13))
    with pytest.raises(KernelError, match="No such device"):
        run_program(program, FRAME, ifindex=1 << 20)
