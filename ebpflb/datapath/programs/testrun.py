# SPDX-License-Identifier: Apache-2.0
"""BPF_PROG_TEST_RUN: runs a program of type SCHED_CLS on a packet, without any device.

The kernel (net/bpf/test_run.c) makes an skb of the frame: its protocol is the frame's EtherType,
its device the one of ``ifindex`` in our network namespace, or loopback. Of ``__sk_buff`` it takes
the fields below and rejects any other that is not zero. A redirect is only returned, not done.
"""

from typing import NamedTuple

from ebpflb.datapath import kernel

PASS, DROP, REDIRECT = 0xFFFFFFFF, 2, 7  # TC_ACT_UNSPEC, _SHOT, _REDIRECT (uapi/linux/pkt_cls.h)

_TEST_RUN, _COMPLETE = 10, 4  # BPF_F_TEST_SKB_CHECKSUM_COMPLETE
_CONTEXTS = 8  # as many of ours are as large as the whole __sk_buff of any kernel
_GROWTH = 4096  # for what a program adds to its packet


class Ran(NamedTuple):
    """What the program returned; the frame, the mark and skb->priority as it left them; and the
    mean time of a run.
    """

    retval: int
    packet: bytes
    nanoseconds: int
    mark: int = 0
    priority: int = 0


def run(
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
    """Runs a program ``repeat`` times on one Ethernet frame of at least 14 bytes.

    From the second run on, the program gets the packet as the run before has left it. With
    ``complete`` the packet has a checksum of the whole (CHECKSUM_COMPLETE), which the program has
    to update.

    Raises KernelError: EINVAL for a shorter frame or one longer than about a page, or where the
    kernel does not know ``complete``; ENODEV where there is no such device; EBADMSG for a sum
    that is wrong afterwards.
    """
    ffi = kernel.ffi
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
    kernel.bpf(_TEST_RUN, "running a program on a packet", attr)
    frame, after = bytes(out[: attr.size_out]), left[0]
    return Ran(int(attr.retval), frame, int(attr.duration), int(after.mark), int(after.priority))


def _at(data: object) -> int:
    return int(kernel.ffi.cast("uintptr_t", data))
