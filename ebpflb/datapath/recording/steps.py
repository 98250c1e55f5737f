# SPDX-License-Identifier: Apache-2.0
"""The map ``steps`` (bpf/record/steps.h): a question for sockets, and the steps of the answer."""

from typing import Any, NamedTuple

from ebpflb.datapath import kernel
from ebpflb.datapath.maps import layout
from ebpflb.datapath.maps.sizes import possible_cpus
from ebpflb.model.addresses import Address
from ebpflb.plan.entries import Frontend

_SIZE = layout.STEPS.value_size
_STRIDE = -(-_SIZE // 8) * 8
_KEY = bytes(4)
_KINDS = layout.names("step_kind", "STEP_")
POLICIES = layout.names("step_policy", "STEP_")
MASQUERADES = layout.names("step_snat", "STEP_SNAT_")
STEP_SOURCES = layout.names("step_source", "STEP_")


class SocketQuestion(NamedTuple):
    """What a socket wants: ``type`` as in socket(2); the cookies of it and of its namespace."""

    frontend: Frontend
    type: int
    netns: int
    initial_netns: int = 0
    socket: int = 0


class Step(NamedTuple):
    """One step; ``kind`` by its name in C in lower case, which says what the others are."""

    kind: str
    value: int
    address: Address


def begin(fd: int, question: SocketQuestion | None = None) -> None:
    """Empties the map, on all CPUs, and asks."""
    steps = layout.ffi.new("struct steps *")
    if question is not None:
        steps.socket, steps.netns = question.socket, question.netns
        steps.initial_netns, steps.type = question.initial_netns, question.type
        packed = layout.address_bytes(question.frontend.address)
        layout.ffi.memmove(layout.ffi.addressof(steps.frontend, "address"), packed, len(packed))
        steps.frontend.port.wire = _swapped(question.frontend.port)
        steps.frontend.protocol = question.frontend.protocol
    one = bytes(layout.ffi.buffer(steps)).ljust(_STRIDE, b"\0")
    kernel.map_update(fd, _KEY, one * possible_cpus())


def read(fd: int) -> list[Step]:
    """The steps of the last run, on whichever CPU it was."""
    cpus = possible_cpus()
    packed = kernel.map_lookup(fd, _KEY, _STRIDE * cpus) or b""
    for cpu in range(cpus):
        cell = layout.ffi.from_buffer(
            "struct steps *", packed[cpu * _STRIDE : cpu * _STRIDE + _SIZE]
        )
        if cell.count:
            return [_step(cell.step[index]) for index in range(cell.count)]
    return []


def port_of(value: int) -> int:
    """The port in a step's low 16 bits, where it is in network order."""
    return _swapped(value & 0xFFFF)


def _swapped(port: int) -> int:
    return port >> 8 | (port & 0xFF) << 8


def _step(found: Any) -> Step:
    words = layout.ffi.addressof(found, "address")
    address = layout.address_from(bytes(layout.ffi.buffer(words)))
    return Step(_KINDS[found.what], int(found.value), address)
