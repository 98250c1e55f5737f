# SPDX-License-Identifier: Apache-2.0
"""Connections that conntrack translates: are there any, and what keeps their NAT alive.

The kernel translates a connection by its conntrack entry, even when the rule that made the entry
has been removed. But with the last rule that uses conntrack, or the last chain of type nat, the
kernel removes its hooks from the network namespace, and every translated connection breaks. So
before rules are removed that may be the last, ``keep_nat_hooks`` makes a table that uses both.

The table of connections may have hundreds of thousands of entries: it is read by NETLINK_NETFILTER
(ctnetlink), only the status of each entry, and only up to the first translated one. 20,000 entries
take 0.06 s of CPU so; pyroute2.NFCTSocket (0.9.7), which decodes each whole entry, takes 1.6 s.
"""

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from pyroute2.nftables.expressions import genex

from ebpflb.node import nft

TABLE = nft.Name("inet", "ebpflb-nat")
_DSTNAT = -100  # NF_IP_PRI_NAT_DST
_CT_STATE, _REGISTER = 0, 1  # NFT_CT_STATE, NFT_REG_VERDICT + 1

_NETFILTER = 12  # NETLINK_NETFILTER
_GET = 1 << 8 | 1  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_GET
_NEW = 1 << 8  # IPCTNL_MSG_CT_NEW, the type of entries
_REQUEST_AND_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_STATUS = 3  # CTA_STATUS
_DST_NAT = 0x20  # IPS_DST_NAT: kube-proxy's connections, and few others
_TYPE = 0x3FFF  # of an attribute, without its flags
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_FAMILY = struct.Struct("=BBH")  # struct nfgenmsg
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr
_ERROR = struct.Struct("=i")  # an errno, or 0
_BUFFER_SIZE = 1 << 16
_COUNT = Path("/proc/sys/net/netfilter/nf_conntrack_count")  # where connections are tracked


def has_dnat_connections() -> bool:
    """Whether there are connections whose destination is translated.

    True also if the kernel tracks connections and cannot list them: then there may be some.
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
    """The status of each entry. Raises OSError if they cannot be listed."""
    while True:
        data, at = kernel.recv(_BUFFER_SIZE), 0
        while at < len(data):
            length, kind, *_ = _HEADER.unpack_from(data, at)
            if kind != _NEW:  # the end, or an error
                (number,) = _ERROR.unpack_from(data, at + _HEADER.size)
                if number:
                    raise OSError(-number, os.strerror(-number))
                return
            yield _status(data, at + _HEADER.size + _FAMILY.size, at + length)
            at += _aligned(length)


def _status(data: bytes, at: int, end: int) -> int:
    while at < end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if kind & _TYPE == _STATUS:
            return int.from_bytes(data[at + 4 : at + 8], "big")
        at += _aligned(length)
    return 0


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def keep_nat_hooks() -> None:
    """Keeps NAT alive for both families, whatever rules are removed. Raises NodeError."""
    if keeps_nat_hooks():
        return
    with nft.edit(TABLE) as edit:
        edit.table("add", name=TABLE.table)
        chain = {"table": TABLE.table, "name": "hold"}
        edit.chain("add", **chain, type="nat", hook="prerouting", priority=_DSTNAT)
        match = genex("ct", {"key": _CT_STATE, "dreg": _REGISTER})  # loads the state, does nothing
        edit.rule("add", table=TABLE.table, chain="hold", expressions=([match],))


def keeps_nat_hooks() -> bool:
    """Whether the table is there."""
    return TABLE in nft.tables()


def release_nat_hooks() -> None:
    """Removes the table. Raises NodeError."""
    nft.delete(TABLE)
