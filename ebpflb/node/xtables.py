# SPDX-License-Identifier: Apache-2.0
"""Is there a chain in iptables-legacy: asked of the kernel, as an agent can that has no tools.

iptables-legacy wants CAP_NET_RAW and a lock file; what it asks, CAP_NET_ADMIN may ask on any
socket (uapi/linux/netfilter_ipv4/ip_tables.h, ip6_tables.h). The name of a chain stands in the
table as the error of its first entry.
"""

import os
import re
import socket
import struct
from contextlib import suppress
from pathlib import Path

from cffi import FFI

from ebpflb.errors import NodeError

_INFO, _ENTRIES = 64, 65  # IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES; of IPv6 the same
_NAME = struct.Struct("=32s")
_SIZED = struct.Struct("=32sI4x")  # struct ipt_get_entries, before its entries
_INFO_LENGTH = 84  # struct ipt_getinfo; its last number is the size of the entries
_CHAIN = rb"ERROR\0.{24}%s\0"  # struct xt_error_target: 29 bytes of its name, a revision, the error
_LEVELS: dict[int, int] = {socket.AF_INET: socket.IPPROTO_IP, socket.AF_INET6: socket.IPPROTO_IPV6}
_TABLES: dict[int, Path] = {
    socket.AF_INET: Path("/proc/net/ip_tables_names"),
    socket.AF_INET6: Path("/proc/net/ip6_tables_names"),
}

_ATTEMPTS = 10  # to read a table that others change all the time

_ffi = FFI()
_ffi.cdef("int getsockopt(int socket, int level, int option, void *value, uint32_t *length);")
_libc = _ffi.dlopen(None)


def tables(family: int) -> set[str]:
    """The tables that there are. Asking for another would make it. Raises NodeError."""
    try:
        return set(_TABLES[family].read_text().split())
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise NodeError(f"{_TABLES[family]}: {error.strerror}") from error


def has_chain(family: int, table: str, chain: str) -> bool:
    """Whether the table is there and has the chain. Raises NodeError where that is not told."""
    if table not in tables(family):
        return False
    try:
        entries = _entries(family, table)
    except OSError as error:
        raise NodeError(f"table {table} of iptables-legacy: {error.strerror}") from error
    return re.search(_CHAIN % re.escape(chain.encode()), entries, re.DOTALL) is not None


def _entries(family: int, table: str) -> bytes:
    """All that the table holds; EAGAIN where it has changed since its size was told."""
    for _ in range(_ATTEMPTS):
        with suppress(BlockingIOError):
            return _read(family, table)
    return _read(family, table)


def _read(family: int, table: str) -> bytes:
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        info = _ask(asking, _INFO, _NAME.pack(table.encode()), _INFO_LENGTH)
        (size,) = struct.unpack_from("=I", info, _INFO_LENGTH - 4)
        head = _SIZED.pack(table.encode(), size)
        return _ask(asking, _ENTRIES, head, len(head) + size)


def _ask(asking: socket.socket, option: int, said: bytes, length: int) -> bytes:
    """As socket.getsockopt, which neither says anything first nor takes more than 1,024 bytes."""
    value = _ffi.new("char[]", length)
    _ffi.memmove(value, said, len(said))
    room = _ffi.new("uint32_t *", length)
    if _libc.getsockopt(asking.fileno(), _LEVELS[asking.family], option, value, room):
        raise OSError(_ffi.errno, os.strerror(_ffi.errno))
    return bytes(_ffi.buffer(value))
