# SPDX-License-Identifier: Apache-2.0
"""Which features this kernel has, found by trying them and not from its version.

Nothing that other programs use is changed: programs and maps are not pinned, and filters are
attached to the loopback device of a new network namespace. For tcx see attach/tcx.py.
"""

import errno
import os
import struct
from collections.abc import Iterator

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf, netlink
from ebpflb.kernel.attach import clsact
from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.maps.layout import RING, MapSpec
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.programs import loader
from ebpflb.kernel.programs.loader import HOOK_TYPES, PACKET_SECTIONS, HookType

_SET_RETVAL, _COARSE_CLOCK, _FIB_LOOKUP, _READ_KERNEL = 187, 160, 69, 113
_ROUTE_SOURCE = 16  # a flag of bpf_fib_lookup
_STORE, _ADD, _CALL, _EXIT, _MOVE, _COPY = 0x7A, 0x07, 0x85, 0x95, 0xB7, 0xBF
_FRAME, _BYTES = 10, 64  # the register with the end of the stack; used bytes of the stack
_CONTEXT, _STACK = "context", "stack"

# The helpers that hooks/packet.c calls, except those of maps: number, then arguments.
PACKET_HELPERS: dict[str, tuple[int | str, ...]] = {
    "ktime_get_ns": (5,),
    "get_prandom_u32": (7,),
    "get_smp_processor_id": (8,),
    "skb_store_bytes": (9, _CONTEXT, 0, _STACK, _BYTES, 0),
    "l3_csum_replace": (10, _CONTEXT, 0, 0, 0, 2),
    "l4_csum_replace": (11, _CONTEXT, 0, 0, 0, 2),
    "skb_vlan_pop": (19, _CONTEXT),
    "redirect": (23, 1, 0),
    "skb_load_bytes": (26, _CONTEXT, 0, _STACK, _BYTES),
    "csum_diff": (28, _STACK, _BYTES, _STACK, _BYTES, 0),
    "skb_change_tail": (38, _CONTEXT, _BYTES, 0),
    "get_socket_cookie": (46, _CONTEXT),
    "fib_lookup": (69, _CONTEXT, _STACK, _BYTES, 0),
    "jiffies64": (118,),
    "redirect_neigh": (152, 1, 0, 0, 0),
}


def _instruction(opcode: int, register: int = 0, number: int = 0, offset: int = 0) -> bytes:
    return struct.pack("<BBhi", opcode, register, offset, number)


def _allow(*before: bytes) -> bytes:
    return b"".join(before) + _instruction(_MOVE, 0, 1) + _instruction(_EXIT)


def _argument(register: int, value: int | str) -> bytes:
    """Load an argument; the context needs no instruction: it already is in the first register."""
    if value == _STACK:
        copied = _instruction(_COPY, register | _FRAME << 4)
        return copied + _instruction(_ADD, register, -_BYTES)
    return b"" if value == _CONTEXT else _instruction(_MOVE, register, int(value))


def _calling(helper: int | str, *arguments: int | str) -> bytes:
    """Return a program that calls a helper, on a stack of zeros."""
    zeros = [_instruction(_STORE, _FRAME, offset=-at) for at in range(8, _BYTES + 8, 8)]
    loads = [_argument(register, value) for register, value in enumerate(arguments, start=1)]
    return _allow(*zeros, *loads, _instruction(_CALL, number=int(helper)))


def _load(hook: HookType, code: bytes) -> int:
    program_type, attach_type = hook
    return bpf.prog_load(
        name="probe", program_type=program_type, attach_type=attach_type, code=code, log=None
    )


def _loads(hook: HookType, code: bytes) -> bool:
    try:
        os.close(_load(hook, code))
    except KernelError:
        return False
    return True


def hook(section: str) -> bool:
    """Whether the kernel has this hook."""
    return _loads(HOOK_TYPES[section], _allow())


def set_retval() -> bool:
    """Whether a hook can choose the errno of the system call (5.18)."""
    return _loads(HOOK_TYPES["cgroup/connect4"], _calling(_SET_RETVAL, -errno.ECONNREFUSED))


def kernel_read() -> bool:
    """Whether a hook may read the kernel's memory: not with ``lockdown=confidentiality``."""
    return _loads(HOOK_TYPES["cgroup/post_bind6"], _calling(_READ_KERNEL, _STACK, _BYTES, 0))


def coarse_clock() -> bool:
    """Whether a program at a device may read the coarse clock (5.11)."""
    return _loads(PACKET_SECTIONS["tc/ingress"], _calling(_COARSE_CLOCK))


def route_source() -> bool:
    """Whether a program at a device may ask for the source that a route would choose (6.7).

    The kernel checks the flag before the address family, which is invalid here.
    """
    zeros = [_instruction(_STORE, _FRAME, offset=-at) for at in range(8, _BYTES + 8, 8)]
    call: tuple[int | str, ...] = (_CONTEXT, _STACK, _BYTES, _ROUTE_SOURCE)
    loads = [_argument(register, value) for register, value in enumerate(call, start=1)]
    code = [*zeros, *loads, _instruction(_CALL, number=_FIB_LOOKUP), _instruction(_EXIT)]
    try:
        program = _load(PACKET_SECTIONS["tc/ingress"], b"".join(code))
    except KernelError:
        return False
    with bpf.closing(program):
        return loader.run_program(program, bytes(64)).retval != 2**32 - errno.EINVAL


def packet_helpers() -> dict[str, bool]:
    """Return for each helper that our packet programs call whether the kernel allows it."""
    (hook,) = set(PACKET_SECTIONS.values())
    return {name: _loads(hook, _calling(*call)) for name, call in PACKET_HELPERS.items()}


def clsact_filters() -> bool:
    """Whether programs can be attached to devices as clsact filters.

    Raises OSError if this cannot be tried, KernelError if there are no such programs.
    """
    with bpf.closing(_load(PACKET_SECTIONS["tc/ingress"], _allow())) as program:
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


def _small_maps() -> Iterator[MapSpec]:
    """Yield one map for each kind and set of flags in maps.h, and one with a lock."""
    kinds = {
        (bpf_map.kernel_kind(spec), spec.flags, spec.value in state_dir.LOCKED): spec
        for spec in layout.MAPS.values()
    }
    return (spec.at_most(4)._replace(name="probe", kind=it[0]) for it, spec in kinds.items())


def unmade_maps() -> list[str]:
    """Return the types of maps, with their flags, that the kernel cannot create."""
    found = []
    for spec in _small_maps():
        try:
            os.close(state_dir.create_map(spec))
        except KernelError:
            found.append(f"{spec.kind} ({', '.join(spec.flags)})")
    return found


def batches() -> dict[str, bool]:
    """Return which types of maps have batches (hashes 5.6, tries 5.13, per-CPU arrays 5.13)."""
    return {spec.kind: _batch(spec) for spec in _small_maps() if spec.kind != RING}


def _batch(spec: MapSpec) -> bool:
    value = bytes((spec.value_size + 7) // 8 * 8 * bpf_map.possible_cpus())
    try:
        with bpf.closing(state_dir.create_map(spec)) as fd:
            bpf.map_write_batch(fd, bytes(spec.key_size), value, 1)
    except KernelError:
        return False
    return True
