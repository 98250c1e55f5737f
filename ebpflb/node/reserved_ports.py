# SPDX-License-Identifier: Apache-2.0
"""Reserves ebpflb's source ports: the node's own sockets do not get them while ebpflb runs.

The kernel never picks a port in net.ipv4.ip_local_reserved_ports for a socket (both families; one
list for each network namespace). The list may hold others' ports too, so a file records what was
added here, and only that is removed again.
"""

import logging
import os
from pathlib import Path

import msgspec

from ebpflb import files, regular_file
from ebpflb.model.kernel_lists import format_numbers, parse_numbers, parse_ranges
from ebpflb.node import sysctl

log = logging.getLogger(__name__)

RESERVED = sysctl.path("net/ipv4/ip_local_reserved_ports")
_PORTS = 1 << 16
_NETNS = Path("/proc/self/ns/net")


class Reservation(msgspec.Struct):
    """What was added to the list of one network namespace."""

    netns: int
    ports: str

    def __post_init__(self) -> None:
        """Raises ValueError for what are no ports, as a file may have them."""
        if any(each.stop > _PORTS for each in parse_ranges(self.ports)):
            raise ValueError(f"{self.ports} are no ports")


def reserve(record: Path, first: int, last: int) -> None:
    """Reserves these ports and no others for ebpflb. Raises OSError if that is not allowed."""
    reserved, before = parse_numbers(RESERVED.read_text()), _reserved_by_us(record)
    others = reserved - before
    added = set(range(first, last + 1)) - others
    if others | added == reserved:
        return
    _remember(record, added | before)  # before the list, so that a crash loses nothing
    try:
        RESERVED.write_text(format_numbers(others | added) + "\n")
    except OSError:
        _remember(record, before)
        raise
    _remember(record, added)


def try_to_reserve(record: Path, first: int, last: int) -> str | None:
    """As reserve, but returns the error: the node's sockets may then get the same ports."""
    try:
        reserve(record, first, last)
    except OSError as error:
        reason = f"{error.filename or RESERVED}: {error.strerror}"
        log.warning("ports %d-%d are not reserved: %s", first, last, reason)
        return reason
    return None


def release(record: Path) -> None:
    """Removes what was added here, if anything. Raises OSError if that is not allowed."""
    added = _reserved_by_us(record)
    if added:
        RESERVED.write_text(format_numbers(parse_numbers(RESERVED.read_text()) - added) + "\n")
    record.unlink(missing_ok=True)


def _reserved_by_us(record: Path) -> set[int]:
    """Nothing if the file is of another network namespace."""
    added = regular_file.decoded(record, Reservation)
    return parse_numbers(added.ports) if added and added.netns == _here() else set()


def _remember(record: Path, ports: set[int]) -> None:
    files.replace(record, msgspec.json.encode(Reservation(_here(), format_numbers(ports))))


def _here() -> int:
    return os.stat(_NETNS).st_ino
