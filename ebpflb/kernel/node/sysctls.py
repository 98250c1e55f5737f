# SPDX-License-Identifier: Apache-2.0
"""The sysctls that ebpflb reads and sets: conntrack, reserved ports, bridges, families.

First the sysctls of connection tracking that kube-proxy sets at start (kube-proxy.md 11.3).
ebpflb's own flows do not need them. But the kernel tracks hostPorts, other rules of the node and
connections that began under kube-proxy, and a node that had kube-proxy keeps its values. A correct
value is not written. Timeouts belong to a network namespace; the size of the table belongs to the
machine, and another program may be responsible for it.
"""

import errno
import logging
import os
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

import msgspec

from ebpflb import files
from ebpflb.errors import NodeError, instead_of_os_error
from ebpflb.model.addresses import Family, format_numbers, parse_numbers, parse_ranges
from ebpflb.model.packet_path import SYSCTLS
from ebpflb.options import ConntrackOptions

# Where the sysctls of this network namespace are written.
#
# In a container /proc/sys is read-only, and nothing can be mounted below /proc; so deploy/chart
# mounts the host's /proc/sys/net once more, at HOST. A process that opens a file below it gets the
# file of its own network namespace, wherever the mount was made.

OWN_PROC_SYS = Path("/proc/sys")
HOST = Path("/host/proc/sys")


def sysctl_path(name: str) -> Path:
    """Return the file of a sysctl such as "net/ipv4/ip_forward"; it need not exist."""
    mounted = HOST / name
    return mounted if mounted.exists() else OWN_PROC_SYS / name


def read_sysctl(name: str) -> str:
    """Return the value of a sysctl, or "" if the kernel does not have it."""
    with suppress(OSError):
        return sysctl_path(name).read_text().strip()
    return ""


def write_sysctl(name: str, value: str) -> None:
    """Set a sysctl. Raises NodeError."""
    with instead_of_os_error(name):
        sysctl_path(name).write_text(f"{value}\n")


# Whether bridges of this network namespace hand packets to netfilter (br_netfilter).


def bridge_calls() -> dict[Family, bool]:
    """Return the answer by family; without the module br_netfilter there are no such sysctls."""
    return {family: files.says_one(sysctl_path(name)) for family, name in SYSCTLS.items()}


# Reserve ebpflb's source ports: the node's own sockets do not get them while ebpflb runs.
#
# The kernel never picks a port in net.ipv4.ip_local_reserved_ports for a socket (both families; one
# list for each network namespace). The list may also hold ports of other programs, so a file
# records the ports added here, and only these are removed again.

log = logging.getLogger(__name__)

RESERVED = sysctl_path("net/ipv4/ip_local_reserved_ports")
_PORTS = 1 << 16
_NETNS = Path("/proc/self/ns/net")


class Reservation(msgspec.Struct):
    """The ports added to the list of one network namespace."""

    netns: int
    ports: str

    def __post_init__(self) -> None:
        """Raises ValueError for invalid ports, as a file may have."""
        if any(each.stop > _PORTS for each in parse_ranges(self.ports)):
            raise ValueError(f"{self.ports} are no ports")


def reserve_ports(record: Path, first: int, last: int) -> str | None:
    """Reserve these ports and no others for ebpflb.

    Returns the error if that is not allowed: the node's sockets may then get the same ports.
    """
    try:
        _reserve(record, {*range(first, last + 1)})
    except OSError as error:
        reason = f"{error.filename or RESERVED}: {error.strerror}"
        log.warning("ports %d-%d are not reserved: %s", first, last, reason)
        return reason
    return None


def _reserve(record: Path, wanted: set[int]) -> None:
    reserved, before = parse_numbers(RESERVED.read_text()), _reserved_by_us(record)
    others = reserved - before
    added = wanted - others
    if others | added == reserved:
        return
    _remember(record, added | before)  # before the list is written, so that a crash loses nothing
    try:
        RESERVED.write_text(format_numbers(others | added) + "\n")
    except OSError:
        _remember(record, before)
        raise
    _remember(record, added)


def release_ports(record: Path) -> None:
    """Remove the ports added here, if any. Raises OSError if that is not allowed."""
    added = _reserved_by_us(record)
    if added:
        RESERVED.write_text(format_numbers(parse_numbers(RESERVED.read_text()) - added) + "\n")
    record.unlink(missing_ok=True)


def _reserved_by_us(record: Path) -> set[int]:
    """Return the recorded ports; none if the file belongs to another network namespace."""
    added = files.decode_regular(record, Reservation)
    return parse_numbers(added.ports) if added and added.netns == _here() else set()


def _remember(record: Path, ports: set[int]) -> None:
    files.replace(record, msgspec.json.encode(Reservation(_here(), format_numbers(ports))))


def _here() -> int:
    return os.stat(_NETNS).st_ino


# Which IP families this kernel and network namespace support (kube-proxy.md 1.3).

_PROC = Path("/proc")


def supported_families(proc: Path = _PROC) -> frozenset[Family]:
    """Return the families: IPv6 unless the kernel lacks it or it is disabled on every device."""
    disabled = files.says_one(proc / "sys/net/ipv6/conf/all/disable_ipv6")
    has_v6 = not disabled and (proc / "net/if_inet6").exists()
    return frozenset(Family) if has_v6 else frozenset({Family.IPV4})


NETFILTER_SYSCTLS = sysctl_path("net/netfilter")
HASH_SIZE = Path("/sys/module/nf_conntrack/parameters/hashsize")
_MOST_ENTRIES = 1 << 20  # entries, however many CPUs there are

# Errors of a sysctl that cannot be set here: no permission, or not the initial network namespace.
_NOT_SETTABLE = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.EOPNOTSUPP}


def set_up_conntrack(
    options: ConntrackOptions, proc: Path = NETFILTER_SYSCTLS, hash_size: Path = HASH_SIZE
) -> None:
    """Set the sysctls. Raises NodeError if a value cannot be set; kube-proxy exits then."""
    if not (proc / "nf_conntrack_max").exists():
        log.info("conntrack is not loaded: its settings are left alone")
        return
    entries = table_size(options, os.cpu_count() or 1)
    if entries:
        _raise_size(proc / "nf_conntrack_max", entries)
        not_settable = _NOT_SETTABLE | {errno.EROFS}  # a container's /sys
        _raise_size(hash_size, entries // 4, not_settable)
    for name, value in _sysctls(options).items():
        if value:
            _set(proc / name, value)


# --conntrack-tcp-be-liberal=auto: the former value is recorded, so that a later agent, or
# `ebpflb cleanup`, can put it back.

LIBERAL = "nf_conntrack_tcp_be_liberal"


def be_liberal(record: Path, proc: Path = NETFILTER_SYSCTLS) -> bool:
    """Let conntrack take TCP segments out of the window for valid; return whether it does.

    A value of 1 that others have set is not recorded, and stays.
    """
    path = proc / LIBERAL
    try:
        if not files.says_one(path):
            files.replace(record, msgspec.json.encode(_here()))
            path.write_text("1\n")
            log.info("sysctl %s set to 1", LIBERAL)
    except OSError as error:
        log.warning("%s: cannot be set to 1: %s", error.filename or path, error.strerror)
    return files.says_one(path)


def be_strict(record: Path, proc: Path = NETFILTER_SYSCTLS) -> None:
    """Put back what ``be_liberal`` has changed in this network namespace, if anything."""
    try:
        if record.exists():
            if files.decode_regular(record, int) == _here():
                _set(proc / LIBERAL, 0)
            record.unlink()
    except NodeError as error:
        log.warning("%s", error)


def table_size(options: ConntrackOptions, cores: int) -> int:
    """Return the minimum of nf_conntrack_max; 0: it is not changed."""
    scaled = options.max_per_core * cores
    if scaled > _MOST_ENTRIES:
        return _MOST_ENTRIES
    return max(scaled, options.min_total) if scaled else 0


def _sysctls(options: ConntrackOptions) -> dict[str, int]:
    return {
        "nf_conntrack_tcp_timeout_established": options.established,
        "nf_conntrack_tcp_timeout_close_wait": options.close_wait,
        LIBERAL: int(options.be_liberal),
        "nf_conntrack_udp_timeout": options.udp,
        "nf_conntrack_udp_timeout_stream": options.udp_stream,
    }


def _raise_size(path: Path, least: int, not_settable: Set[int] = _NOT_SETTABLE) -> None:
    """Raise the value, never lower it; a failure is only logged, as in kube-proxy."""
    try:
        if int(path.read_text()) < least:
            path.write_text(f"{least}\n")
            log.info("sysctl %s set to %d", path.name, least)
    except OSError as error:
        if error.errno not in not_settable:
            raise NodeError(f"{path}: cannot be set to {least}: {error.strerror}") from error
        log.warning("%s: not set to %d: %s", path, least, error.strerror)


def _set(path: Path, value: int) -> None:
    with instead_of_os_error(f"{path}: cannot be set to {value}"):
        if int(path.read_text()) != value:
            path.write_text(f"{value}\n")
            log.info("sysctl %s set to %d", path.name, value)
