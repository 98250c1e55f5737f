# SPDX-License-Identifier: Apache-2.0
"""What a program over the kernel's TCP sockets calls and reads, in the running kernel's numbers.

bpf/layout/quiet_socket.h has a number for each; the program's bytecode has it in a 64-bit load
(opcode 0x18) or a call (0x85), where it is replaced before the program is loaded.
"""

import struct
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from ebpflb.kernel.btf import KernelTypes
from ebpflb.kernel.maps.layout import names

_SOCK = "inet_conn.icsk_inet.sk."
_FIELDS = {  # of struct tcp_sock
    "state": f"{_SOCK}__sk_common.skc_state",
    "write_seq": "write_seq",
    "snd_una": "snd_una",
    "rcv_nxt": "rcv_nxt",
    "copied_seq": "copied_seq",
    "snd_wl1": "snd_wl1",
    "lsndtime": "lsndtime",
    "lrcvtime": "inet_conn.icsk_ack.lrcvtime",
    "backlog": f"{_SOCK}sk_backlog.head",
    "out_of_order": "out_of_order_queue",
    "user_data": f"{_SOCK}sk_user_data",
    "ulp_ops": "inet_conn.icsk_ulp_ops",
}
_DESTROY, _ITERATOR, _TCP_SOCK = "bpf_sock_destroy", "bpf_iter_tcp", "tcp_sock"
_LOAD64, _CALL, _OF_THE_KERNEL = 0x18, 0x85, 2 << 4  # BPF_PSEUDO_KFUNC_CALL, as source register


class KernelPlaces(NamedTuple):
    """``iterator``: the kernel's function that goes through TCP sockets; ``destroy``: ends one."""

    iterator: int
    destroy: int
    fields: Mapping[int, int]  # number in bytecode -> byte of struct tcp_sock

    def put_into(self, code: bytes) -> bytes:
        """Return the bytecode with the kernel's numbers."""
        patched, at = bytearray(code), 0
        while at < len(patched):
            opcode, registers, _, number = struct.unpack_from("<BBhi", patched, at)
            if opcode == _LOAD64 and not registers >> 4 and number in self.fields:
                struct.pack_into("<i", patched, at + 4, self.fields[number])
            elif opcode == _CALL and _NUMBERS.get(number) == "sock_destroy":
                struct.pack_into("<BBhi", patched, at, _CALL, _OF_THE_KERNEL, 0, self.destroy)
            at += 16 if opcode == _LOAD64 else 8
        return bytes(patched)


_NUMBERS = names("kernel_place", "KERNEL_")


@cache
def found() -> KernelPlaces:
    """Return the running kernel's places. Raises NodeError if it lacks one (before 6.5)."""
    types = KernelTypes({_DESTROY, _ITERATOR}, {_TCP_SOCK})
    fields = {
        number: types.place(_TCP_SOCK, _FIELDS[name])
        for number, name in _NUMBERS.items()
        if name in _FIELDS
    }
    return KernelPlaces(types.function(_ITERATOR), types.function(_DESTROY), fields)
