# SPDX-License-Identifier: Apache-2.0
"""The programs' sources, and the compiler's flags for them on this kernel."""

from ebpflb.kernel import probe

SOCKET_SOURCE, PACKET_SOURCE = "hooks/socket.c", "hooks/packet.c"
# By whether packets have a link header; packets without one begin with the IP header.
LINK_VARIANTS = {True: (), False: ("-DNO_LINK_HEADER",)}


def socket_flags() -> tuple[str, ...]:
    """Return the compiler's flags for the socket hooks on this kernel."""
    return ("-DHAVE_SET_RETVAL",) if probe.set_retval() else ()


def guard_flags() -> tuple[str, ...]:
    """Return the additional flags of the bind guard, which must be able to set an errno."""
    return ("-DHAVE_KERNEL_READ",) if probe.set_retval() and probe.kernel_read() else ()


def packet_flags() -> tuple[str, ...]:
    """Return the compiler's flags for the packet hooks on this kernel."""
    return ("-DHAVE_COARSE_CLOCK",) if probe.coarse_clock() else ()
