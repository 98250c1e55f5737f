# SPDX-License-Identifier: Apache-2.0
"""Sets the sysctls of connection tracking that kube-proxy sets at start (kube-proxy.md 11.3).

ebpflb's own flows do not need them. But hostPorts, other rules of the node and connections that
began under kube-proxy are tracked by the kernel, and a node that had kube-proxy keeps its values.
A value that is right is not written. Timeouts belong to a network namespace; the size of the table
belongs to the machine, and another program may be responsible for it.
"""

import errno
import logging
import os
from collections.abc import Set
from pathlib import Path

from ebpflb.errors import NodeError
from ebpflb.model.kernel_lists import parse_ranges
from ebpflb.node import sysctl
from ebpflb.options import ConntrackOptions

log = logging.getLogger(__name__)

NETFILTER_SYSCTLS = sysctl.path("net/netfilter")
HASH_SIZE = Path("/sys/module/nf_conntrack/parameters/hashsize")
ONLINE = Path("/sys/devices/system/cpu/online")
_MOST_ENTRIES = 1 << 20  # entries, however many CPUs there are

# It cannot be set here: no permission, or not the machine's first network namespace.
_NOT_SETTABLE = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.EOPNOTSUPP}


def set_up(
    options: ConntrackOptions,
    proc: Path = NETFILTER_SYSCTLS,
    hash_size: Path = HASH_SIZE,
    *,
    former: dict[Path, str] | None = None,
) -> None:
    """Raises NodeError if a value cannot be set; kube-proxy exits then.

    What was there before is added to ``former`` for each file that is written.
    """
    former = {} if former is None else former
    if not (proc / "nf_conntrack_max").exists():
        log.info("conntrack is not there: none of its settings are set")
        return
    entries = table_size(options, cpus())
    if entries:
        _raise_size(former, proc / "nf_conntrack_max", entries)
        not_settable = _NOT_SETTABLE | {errno.EROFS}  # a container's /sys
        _raise_size(former, hash_size, entries // 4, not_settable)
    for name, value in _sysctls(options).items():
        if value:
            _set(former, proc / name, value)


def restore(path: Path, former: str) -> None:
    """Writes back what ``set_up`` has found of one setting. Raises OSError."""
    path.write_text(former)
    log.info("%s: %s again", path.name, former.strip())


def table_size(options: ConntrackOptions, cores: int) -> int:
    """The minimum of nf_conntrack_max; 0: it is not changed."""
    scaled = options.max_per_core * cores
    if scaled > _MOST_ENTRIES:
        return _MOST_ENTRIES
    return max(scaled, options.min_total) if scaled else 0


def cpus(online: Path = ONLINE) -> int:
    """How many the machine has, even if this process may not run on all of them."""
    try:
        found = sum(map(len, parse_ranges(online.read_text())))
    except (OSError, ValueError):
        found = 0
    return found or os.cpu_count() or 1


def _sysctls(options: ConntrackOptions) -> dict[str, int]:
    return {
        "nf_conntrack_tcp_timeout_established": options.established,
        "nf_conntrack_tcp_timeout_close_wait": options.close_wait,
        "nf_conntrack_tcp_be_liberal": int(options.be_liberal),
        "nf_conntrack_udp_timeout": options.udp,
        "nf_conntrack_udp_timeout_stream": options.udp_stream,
    }


def _raise_size(
    former: dict[Path, str], path: Path, least: int, not_settable: Set[int] = _NOT_SETTABLE
) -> None:
    """Never lowers it. If it cannot be set here it is only logged, as in kube-proxy."""
    try:
        if int(found := path.read_text()) < least:
            path.write_text(f"{least}\n")
            former[path] = found
            log.info("%s: %d", path.name, least)
    except OSError as error:
        if error.errno not in not_settable:
            raise NodeError(f"{path}: cannot be set to {least}: {error.strerror}") from error
        log.warning("%s: not set to %d: %s", path, least, error.strerror)


def _set(former: dict[Path, str], path: Path, value: int) -> None:
    try:
        if int(found := path.read_text()) != value:
            path.write_text(f"{value}\n")
            former[path] = found
            log.info("%s: %d", path.name, value)
    except OSError as error:
        raise NodeError(f"{path}: cannot be set to {value}: {error.strerror}") from error
