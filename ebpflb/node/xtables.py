# SPDX-License-Identifier: Apache-2.0
"""Finds a chain of iptables-legacy by asking the kernel, without the tool.

iptables-legacy needs CAP_NET_RAW and a lock file; the same getsockopt(2) works on any socket with
CAP_NET_ADMIN (uapi/linux/netfilter_ipv4/ip_tables.h, ip6_tables.h). In the table, the name of a
chain is the error of its first entry.
"""

import re
import socket
import struct
from contextlib import suppress
from pathlib import Path

from ebpflb import libc
from ebpflb.errors import NodeError

_INFO, _ENTRIES = 64, 65  # IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES; of IPv6 the same
_NAME = struct.Struct("=32s")
_SIZED = struct.Struct("=32sI4x")  # struct ipt_get_entries, before its entries
_INFO_LENGTH = 84  # struct ipt_getinfo; its last number is the size of the entries
_CHAIN = rb"ERROR\0.{24}%s\0"  # struct xt_error_target: 29 bytes of its name, a revision, the error
_LEVELS: dict[int, int] = {socket.AF_INET: socket.IPPROTO_IP, socket.AF_INET6: socket.IPPROTO_IPV6}
_TABLES: dict[int, Path] = {
    socket.AF_INET: Path("/proc/thread-self/net/ip_tables_names"),
    socket.AF_INET6: Path("/proc/thread-self/net/ip6_tables_names"),
}

_ATTEMPTS = 10  # to read a table that others change meanwhile


def tables(family: int) -> set[str]:
    """The tables that exist, in this thread's network namespace. To read another one would create
    it. Raises NodeError.
    """
    try:
        return set(_TABLES[family].read_text().split())
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise NodeError(f"{_TABLES[family]}: {error.strerror}") from error


def has_chain(family: int, table: str, chain: str) -> bool:
    """Whether the table exists and has the chain. Raises NodeError if it cannot be read."""
    if table not in tables(family):
        return False
    try:
        entries = _entries(family, table)
    except OSError as error:
        raise NodeError(f"table {table} of iptables-legacy: {error.strerror}") from error
    return re.search(_CHAIN % re.escape(chain.encode()), entries, re.DOTALL) is not None


def _entries(family: int, table: str) -> bytes:
    """The bytes of the table. Raises EAGAIN if its size changes each time it is read."""
    for _ in range(_ATTEMPTS):
        with suppress(BlockingIOError):
            return _read(family, table)
    return _read(family, table)


def _read(family: int, table: str) -> bytes:
    with socket.socket(family, socket.SOCK_DGRAM) as socket_:
        level = _LEVELS[family]
        info = libc.getsockopt(socket_, level, _INFO, _NAME.pack(table.encode()), _INFO_LENGTH)
        (size,) = struct.unpack_from("=I", info, _INFO_LENGTH - 4)
        head = _SIZED.pack(table.encode(), size)
        return libc.getsockopt(socket_, level, _ENTRIES, head, len(head) + size)
