# SPDX-License-Identifier: Apache-2.0
"""Source ports that are ours alone: kept from the host's own sockets, as long as we are here.

The kernel leaves out net.ipv4.ip_local_reserved_ports when it picks a port (both families; one
list for each network namespace). It may name others' ports too, so what we added to it is
remembered in a file, and only that is taken away again.
"""

import logging
import os
from pathlib import Path

import msgspec

from ebpflb.model.kernel_lists import parse_ranges
from ebpflb.node import sysctl

log = logging.getLogger(__name__)

RESERVED = sysctl.path("net/ipv4/ip_local_reserved_ports")
_NETNS = Path("/proc/self/ns/net")


class Reservation(msgspec.Struct):
    """What we added to the list of one network namespace."""

    netns: int
    ports: str


def parse(text: str) -> set[int]:
    """The kernel's notation: single ports and ranges, with commas between."""
    return {port for span in parse_ranges(text) for port in span}


def notation(ports: set[int]) -> str:
    """The inverse of parse."""
    firsts = sorted(port for port in ports if port - 1 not in ports)
    lasts = sorted(port for port in ports if port + 1 not in ports)
    pairs = zip(firsts, lasts, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def reserve(record: Path, first: int, last: int) -> None:
    """Reserves these ports and no others of ours. Raises OSError where that is not allowed."""
    reserved, before = parse(RESERVED.read_text()), _reserved_by_us(record)
    others = reserved - before
    added = set(range(first, last + 1)) - others
    if others | added == reserved:
        return
    _remember(record, added | before)  # a crash before the end forgets nothing
    try:
        RESERVED.write_text(notation(others | added) + "\n")
    except OSError:
        _remember(record, before)
        raise
    _remember(record, added)


def try_to_reserve(record: Path, first: int, last: int) -> str | None:
    """As reserve, but why not where it fails: the host may then take the same ports."""
    try:
        reserve(record, first, last)
    except OSError as error:
        log.warning("ports %d-%d are not reserved: %s: %s", first, last, RESERVED, error.strerror)
        return f"{RESERVED}: {error.strerror}"
    return None


def release(record: Path) -> None:
    """Takes away what we added here, if anything. Raises OSError where that is not allowed."""
    added = _reserved_by_us(record)
    if added:
        RESERVED.write_text(notation(parse(RESERVED.read_text()) - added) + "\n")
    record.unlink(missing_ok=True)


def _reserved_by_us(record: Path) -> set[int]:
    """Nothing where the file is of another network namespace: there it is not ours."""
    try:
        added = msgspec.json.decode(record.read_bytes(), type=Reservation)
    except (OSError, msgspec.MsgspecError):
        return set()
    return parse(added.ports) if added.netns == _here() else set()


def _remember(record: Path, ports: set[int]) -> None:
    half = record.with_suffix(".half")
    half.write_bytes(msgspec.json.encode(Reservation(_here(), notation(ports))))
    half.replace(record)


def _here() -> int:
    return os.stat(_NETNS).st_ino
