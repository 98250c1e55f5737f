# SPDX-License-Identifier: Apache-2.0
"""Does conntrack translate connections in this network namespace? (NETLINK_NETFILTER, ctnetlink)

The table may have hundreds of thousands of entries, so of each only the status is read, and no
more of them than it takes.
"""

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_NETFILTER = 12  # NETLINK_NETFILTER
_GET = 1 << 8 | 1  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_GET
_NEW = 1 << 8  # IPCTNL_MSG_CT_NEW, as entries are told
_REQUEST_AND_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_STATUS = 3  # CTA_STATUS
_DST_NAT = 0x20  # IPS_DST_NAT: what kube-proxy translates, and little else
_TYPE = 0x3FFF  # of an attribute, without its flags
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_FAMILY = struct.Struct("=BBH")  # struct nfgenmsg
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr
_NUMBER = struct.Struct("=i")  # of an error, or 0
_ROOM = 1 << 16
_COUNT = Path("/proc/sys/net/netfilter/nf_conntrack_count")  # where connections are tracked


def has_dnat_connections() -> bool:
    """Whether there are connections to an address that is translated.

    True also where the kernel tracks connections and does not tell: then there may be some.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER) as kernel:
            length = _HEADER.size + _FAMILY.size
            header = _HEADER.pack(length, _GET, _REQUEST_AND_DUMP, 1, 0)
            kernel.send(header + _FAMILY.pack(socket.AF_UNSPEC, 0, 0))
            return any(status & _DST_NAT for status in _statuses(kernel))
    except OSError:
        return _COUNT.exists()


def _statuses(kernel: socket.socket) -> Iterator[int]:
    """Of all entries. Raises OSError where they are not told."""
    while True:
        told, at = kernel.recv(_ROOM), 0
        while at < len(told):
            length, kind, *_ = _HEADER.unpack_from(told, at)
            if kind != _NEW:  # the end, or an error
                (number,) = _NUMBER.unpack_from(told, at + _HEADER.size)
                if number:
                    raise OSError(-number, os.strerror(-number))
                return
            yield _status(told, at + _HEADER.size + _FAMILY.size, at + length)
            at += _aligned(length)


def _status(told: bytes, at: int, end: int) -> int:
    while at < end:
        length, kind = _ATTRIBUTE.unpack_from(told, at)
        if kind & _TYPE == _STATUS:
            return int.from_bytes(told[at + 4 : at + 8], "big")
        at += _aligned(length)
    return 0


def _aligned(length: int) -> int:
    return (length + 3) & ~3
