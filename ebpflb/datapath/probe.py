# SPDX-License-Identifier: Apache-2.0
"""What this kernel can do, found out by trying; never guessed from its version."""

import os
import socket
import struct

from ebpflb.datapath import kernel, state
from ebpflb.datapath.layout import MapSpec
from ebpflb.datapath.programs import SECTIONS
from ebpflb.errors import KernelError

SO_NETNS_COOKIE = 71
_SET_RETVAL = 187
_CALL, _EXIT, _MOVE = 0x85, 0x95, 0xB7


def _instruction(opcode: int, register: int = 0, number: int = 0) -> bytes:
    return struct.pack("<BBhi", opcode, register, 0, number)


def _allow(*before: bytes) -> bytes:
    return b"".join(before) + _instruction(_MOVE, 0, 1) + _instruction(_EXIT)


def _loads(section: str, code: bytes) -> bool:
    kind, point = SECTIONS[section]
    try:
        os.close(kernel.prog_load(name="probe", kind=kind, attach=point, code=code, log=None))
    except KernelError:
        return False
    return True


def hook(section: str) -> bool:
    """Whether the kernel has this hook."""
    return _loads(section, _allow())


def set_retval() -> bool:
    """Whether a hook can name its errno (5.18)."""
    call = _instruction(_MOVE, 1, -111) + _instruction(_CALL, 0, _SET_RETVAL)
    return _loads("cgroup/connect4", _allow(call))


def map_works() -> None:
    """Raises KernelError, with its reason, if bpf(2) does not let us make a map at all."""
    os.close(state.make_map(MapSpec("probe", "HASH", "__u32", "__u32", 4, ("NONE",))))


def batch() -> bool:
    """Whether hashes are written in batches (5.6)."""
    fd = state.make_map(MapSpec("probe", "HASH", "__u32", "__u32", 4, ("NONE",)))
    try:
        kernel.map_write_batch(fd, bytes(4), bytes(4), 1)
    except KernelError:
        return False
    finally:
        os.close(fd)
    return True


def mappable_arrays() -> bool:
    """Whether arrays can be written through memory (5.5)."""
    try:
        os.close(state.make_map(MapSpec("probe", "ARRAY", "__u32", "__u32", 4, ("MMAPABLE",))))
    except KernelError:
        return False
    return True


def netns_cookie() -> int | None:
    """The cookie of our network namespace, or None where the kernel does not tell (5.14)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        except OSError:
            return None
    return int.from_bytes(packed, "little")
