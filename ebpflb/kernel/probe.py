# SPDX-License-Identifier: Apache-2.0
"""Which features this kernel has, found by trying them and not from its version.

Nothing that other programs use is changed: programs and maps are not pinned, and filters are
attached to the loopback device of a new network namespace. For tcx see attach/tcx.py.
"""

import errno
import os
import struct

from ebpflb.errors import KernelError, NodeError
from ebpflb.kernel import bpf, netlink
from ebpflb.kernel.attach import clsact
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.maps.layout import MapSpec
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.programs import kernel_places, loader
from ebpflb.kernel.programs.loader import HOOK_TYPES, PACKET_SECTIONS, SCHED_CLS, HookType

_SET_RETVAL, _COARSE_CLOCK, _FIB_LOOKUP, _READ_KERNEL = 187, 160, 69, 113
_PROCESS, _COMM = 14, 16  # get_current_pid_tgid, get_current_comm
_ROUTE_SOURCE = 16  # a flag of bpf_fib_lookup
_STORE, _ADD, _CALL, _EXIT, _MOVE, _COPY = 0x7A, 0x07, 0x85, 0x95, 0xB7, 0xBF
_FRAME, _BYTES = 10, 64  # the register with the end of the stack; used bytes of the stack
_CONTEXT, _STACK = "context", "stack"


def _instruction(opcode: int, register: int = 0, number: int = 0, offset: int = 0) -> bytes:
    return struct.pack("<BBhi", opcode, register, offset, number)


_RETURN = _instruction(_EXIT)
_ALLOW = _instruction(_MOVE, 0, 1) + _RETURN


def _argument(register: int, value: int | str) -> bytes:
    """Load an argument; the context needs no instruction: it already is in the first register."""
    if value == _STACK:
        copied = _instruction(_COPY, register | _FRAME << 4)
        return copied + _instruction(_ADD, register, -_BYTES)
    return b"" if value == _CONTEXT else _instruction(_MOVE, register, int(value))


def _call(helper: int, *arguments: int | str) -> bytes:
    """Return the instructions that call a helper, on a stack of zeros."""
    zeros = [_instruction(_STORE, _FRAME, offset=-at) for at in range(8, _BYTES + 8, 8)]
    loads = [_argument(register, value) for register, value in enumerate(arguments, start=1)]
    return b"".join([*zeros, *loads, _instruction(_CALL, number=helper)])


def _loads(hook: HookType, code: bytes) -> bool:
    try:
        os.close(bpf.prog_load(name="probe", code=code, **hook._asdict()))
    except KernelError:
        return False
    return True


def hook(section: str) -> bool:
    """Whether the kernel has this hook."""
    return _loads(HOOK_TYPES[section], _ALLOW)


def set_retval() -> bool:
    """Whether a hook can choose the errno of the system call (5.18)."""
    return _loads(HOOK_TYPES["cgroup/connect4"], _call(_SET_RETVAL, -errno.ECONNREFUSED) + _ALLOW)


def kernel_read() -> bool:
    """Whether a hook may read the kernel's memory: not with ``lockdown=confidentiality``."""
    return _loads(HOOK_TYPES["cgroup/post_bind6"], _call(_READ_KERNEL, _STACK, _BYTES, 0) + _ALLOW)


def process() -> bool:
    """Whether a hook may ask for the number and the name of the process (6.1)."""
    both = _call(_PROCESS) + _call(_COMM, _STACK, _BYTES)
    return _loads(HOOK_TYPES["cgroup/connect4"], both + _ALLOW)


def coarse_clock() -> bool:
    """Whether a program at a device may read the coarse clock (5.11)."""
    return _loads(PACKET_SECTIONS["tc/ingress"], _call(_COARSE_CLOCK) + _ALLOW)


def sock_destroy() -> bool:
    """Whether a program may end sockets while it goes through them (6.5)."""
    try:
        kernel_places.found()
    except NodeError:
        return False
    return True


def route_source() -> bool:
    """Whether a program at a device may ask for the source that a route would choose (6.7).

    The kernel checks the flag before the address family, which is invalid here.
    """
    code = _call(_FIB_LOOKUP, _CONTEXT, _STACK, _BYTES, _ROUTE_SOURCE) + _RETURN
    try:
        program = bpf.prog_load(name="probe", program_type=SCHED_CLS, code=code)
    except KernelError:
        return False
    with bpf.closing(program):
        return loader.run_program(program, bytes(64)).retval != 2**32 - errno.EINVAL


def clsact_filters() -> bool:
    """Whether programs can be attached to devices as clsact filters.

    Raises OSError if this cannot be tried, KernelError if there are no such programs.
    """
    with bpf.closing(bpf.prog_load(name="probe", program_type=SCHED_CLS, code=_ALLOW)) as program:
        return namespaces.call_in_new(lambda: _filters(program))


def _filters(program: int) -> bool:
    """Attach to device 1, which is loopback in a new namespace."""
    try:
        with netlink.route_socket() as kernel:
            clsact.add_qdisc(kernel, 1)
            for hook in clsact.PARENTS:
                clsact.put_filter(kernel, 1, hook, 1, program, "probe")
    except OSError:
        return False
    return True


def map_works() -> None:
    """Create a map. Raises KernelError if bpf(2) cannot create any map."""
    os.close(state_dir.create_map(MapSpec("probe", "HASH", "__u32", "__u32", 4, ("NONE",))))
