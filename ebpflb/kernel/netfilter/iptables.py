# SPDX-License-Identifier: Apache-2.0
"""iptables in this network namespace: both families, in the legacy and the nf_tables variant.

Only iptables' own tools can read and write its rules. `iptables` may be either variant, so the tool
is asked; a machine may also have `iptables-legacy` and `iptables-nft`.
"""

import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from socket import AF_INET, AF_INET6

from ebpflb import child
from ebpflb.errors import NodeError
from ebpflb.kernel import libc
from ebpflb.kernel.netfilter import nft
from ebpflb.model.kube_proxy import IptablesTable, parse_rules

# Find a chain of iptables-legacy by asking the kernel, without the tool.
#
# iptables-legacy needs CAP_NET_RAW and a lock file; the same getsockopt(2) works on any socket with
# CAP_NET_ADMIN (uapi/linux/netfilter_ipv4/ip_tables.h, ip6_tables.h). In the table, the name of a
# chain is the error of its first entry.

_INFO, _ENTRIES = 64, 65  # IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES; the same for IPv6
_TABLE_NAME = struct.Struct("=32s")
_SIZED = struct.Struct("=32sI4x")  # struct ipt_get_entries, before its entries
_INFO_LENGTH = 84  # struct ipt_getinfo; its last number is the size of the entries
_CHAIN = rb"ERROR\0.{24}%s\0"  # struct xt_error_target: 29 bytes of its name, a revision, the error
_LEVELS: dict[int, int] = {socket.AF_INET: socket.IPPROTO_IP, socket.AF_INET6: socket.IPPROTO_IPV6}
_LEGACY_TABLES: dict[int, Path] = {
    socket.AF_INET: Path("/proc/thread-self/net/ip_tables_names"),
    socket.AF_INET6: Path("/proc/thread-self/net/ip6_tables_names"),
}

_ATTEMPTS = 10  # to read a table that others change meanwhile


def legacy_tables(family: int) -> set[str]:
    """Return the existing tables in this thread's network namespace. Raises NodeError.

    Reading a table that does not exist would create it.
    """
    try:
        return set(_LEGACY_TABLES[family].read_text().split())
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise NodeError(f"{_LEGACY_TABLES[family]}: {error.strerror}") from error


def legacy_has_chain(family: int, table: str, chain: str) -> bool:
    """Whether the table exists and has the chain. Raises NodeError if it cannot be read."""
    if table not in legacy_tables(family):
        return False
    try:
        entries = _entries(family, table)
    except OSError as error:
        raise NodeError(f"table {table} of iptables-legacy: {error.strerror}") from error
    return re.search(_CHAIN % re.escape(chain.encode()), entries, re.DOTALL) is not None


def _entries(family: int, table: str) -> bytes:
    """Return the bytes of the table. Raises EAGAIN if its size changes at each reading."""
    for _ in range(_ATTEMPTS):
        with suppress(BlockingIOError):
            return read_table(family, table)
    return read_table(family, table)


def read_table(family: int, table: str) -> bytes:
    with socket.socket(family, socket.SOCK_DGRAM) as socket_:
        level, info = _LEVELS[family], _info(socket_, family, table)
        (size,) = struct.unpack_from("=I", info, _INFO_LENGTH - 4)
        head = _SIZED.pack(table.encode(), size)
        return libc.getsockopt(socket_, level, _ENTRIES, head, len(head) + size)


def legacy_size(family: int, table: str) -> bytes:
    """Return how many entries the table has, and of which size; empty if it does not exist.

    Raises NodeError.
    """
    if table not in legacy_tables(family):
        return b""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as socket_:
            return _info(socket_, family, table)
    except OSError as error:
        raise NodeError(f"table {table} of iptables-legacy: {error.strerror}") from error


def _info(opened: socket.socket, family: int, table: str) -> bytes:
    """Return struct ipt_getinfo. Raises OSError."""
    name = _TABLE_NAME.pack(table.encode())
    return libc.getsockopt(opened, _LEVELS[family], _INFO, name, _INFO_LENGTH)


LEGACY, NFT = "legacy", "nft"
_LOCK_TIMEOUT = "10"  # seconds to wait for the lock of the iptables tools
FAMILY_OF_TOOL = {"iptables": AF_INET, "ip6tables": AF_INET6}
NFT_FAMILY = {"iptables": "ip", "ip6tables": "ip6"}


@dataclass(frozen=True)
class Tool:
    """One family in one variant."""

    family: str  # iptables or ip6tables
    variant: str  # legacy or nft

    @cached_property
    def command(self) -> str | None:
        """The program; None if it is not installed. Most tables are not there: it is rarely asked.

        Raises NodeError.
        """
        return _command(self.family, self.variant)

    @property
    def name(self) -> str:
        return f"{self.family}-{self.variant}"

    def tables(self) -> list[IptablesTable]:
        """Return all tables. Reading loads no module and creates no table. Raises NodeError."""
        return parse_rules(run([f"{self.command}-save"]))

    def table(self, name: str) -> IptablesTable | None:
        """Return one table, or None if it does not exist. Raises NodeError.

        Reading creates no table.
        """
        if not self.has(name):
            return None
        if not self.command:
            raise NodeError(f"{self.name}: it has rules, and {self.name} is not installed here")
        return next(iter(parse_rules(run([f"{self.command}-save", "-t", name]))), None)

    def has(self, table: str) -> bool:
        """Whether the kernel has this table. Raises NodeError."""
        if self.variant == LEGACY:
            return table in legacy_tables(FAMILY_OF_TOOL[self.family])
        return nft.Name(NFT_FAMILY[self.family], table) in nft.tables()

    def restore(self, script: str) -> None:
        """Apply all of the script or nothing. Raises NodeError with the tool's message."""
        run([f"{self.command}-restore", "-w", _LOCK_TIMEOUT, "--noflush"], script)


def tools() -> Iterator[Tool]:
    """Yield both families in both variants."""
    for family in FAMILY_OF_TOOL:
        for variant in (LEGACY, NFT):
            yield Tool(family, variant)


def _command(family: str, variant: str) -> str | None:
    named = f"{family}-{variant}"
    if child.find(f"{named}-save") and child.find(f"{named}-restore"):
        return named
    return family if child.find(f"{family}-save") and _variant(family) == variant else None


def _variant(command: str) -> str:
    """Return the variant, which iptables(8) prints since 1.8: "(nf_tables)" or "(legacy)"."""
    return NFT if "(nf_tables)" in run([command, "-V"]) else LEGACY


def run(command: list[str], stdin: str = "") -> str:
    """Return the output of a tool. Raises NodeError with the tool's message."""
    try:
        done = child.run(command, stdin)
    except OSError as error:
        raise NodeError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise NodeError(f"{command[0]}: {reason}")
    return done.stdout
