# SPDX-License-Identifier: Apache-2.0
"""What the maps hold after a clean stop: the next agent has it from a file, and need not read them.

    <run-dir>/<name>.contents    the contents, and which maps in which state hold them
    <state-dir>/contents         the file's digest (state_record.py)

The file counts if its digest is recorded beside the maps, by the same version of ebpflb, and the
maps are the same ones, by their ids, with the same count of writes, which each agent increases. The
digest is removed before an agent writes anything, so an agent that is killed leaves none; like the
pins, it does not outlive a boot. What other programs have written meanwhile is found by the audit,
which compares the maps soon after a start.
"""

import hashlib
import logging
from collections.abc import Mapping
from contextlib import suppress

import msgspec
from msgspec import Raw, Struct

from ebpflb import files
from ebpflb.errors import in_words
from ebpflb.files import UnusableFile
from ebpflb.kernel import bpf
from ebpflb.kernel.maps import state_record
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.options import Paths
from ebpflb.plan import kept_contents
from ebpflb.plan.map_contents import MapContents
from ebpflb.version import VERSION

log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20  # 100,000 endpoints take 4 MB
_MAPS = (
    "services",
    "slots",
    "backend_slots",
    "choices",
    "service_names",
    "backend_names",
    "source_ranges",
    "cluster_ips",
    "settings",
)


class CleanStop(Struct):
    """What the maps hold; ``table`` identifies the state of nftables, b"" if that is unknown."""

    contents: MapContents
    table: bytes


class _File(Struct, array_like=True):
    """The contents of the maps; the other fields must be equal at the next start."""

    version: str
    maps: dict[str, int]  # name -> the kernel's id
    writes: int
    table: bytes
    contents: Raw


_decoder = msgspec.msgpack.Decoder(_File)


def write(paths: Paths, maps: Mapping[str, Map], stop: CleanStop) -> None:
    """Leave the contents to the next agent. If they cannot be written, it reads the maps."""
    writes = maps["settings"].get(0).writes
    if writes % 2:
        return  # a write was not completed
    contents = Raw(kept_contents.encode(stop.contents))
    data = msgspec.msgpack.encode(_File(VERSION, _ids(maps), writes, stop.table, contents))
    try:
        if len(data) > MOST_BYTES:
            raise UnusableFile(f"larger than {MOST_BYTES >> 20} MiB")
        files.replace(paths.contents_file, data)
        state_record.write_digest(paths.state, _digest(data))
    except (OSError, UnusableFile) as error:
        log.info("the next agent has to read the maps: %s", in_words(error))
        _remove(paths)


def take(paths: Paths, state: StateDir, maps: Mapping[str, Map]) -> CleanStop | None:
    """Return what the last agent left, once: the digest and the file are removed.

    None if there is nothing, or if it may differ from what the maps hold.
    """
    digest, data = "", b""
    try:
        if digest := state_record.take_digest(paths.state):
            data = files.read_regular(paths.contents_file, MOST_BYTES)
    except (OSError, UnusableFile) as error:
        log.info(
            "the maps are read, as it is not known how the last agent left them: %s",
            in_words(error),
        )
    _remove(paths)
    if not digest or _digest(data) != digest or state.old_layouts():
        return None
    file = _decoder.decode(data)
    now = VERSION, _ids(maps), maps["settings"].get(0).writes
    if now != (file.version, file.maps, file.writes):
        return None
    log.info("the maps are not read: they are as the last agent left them when it stopped")
    return CleanStop(kept_contents.decode(file.contents), file.table)


def _remove(paths: Paths) -> None:
    with suppress(OSError):
        paths.contents_file.unlink()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _ids(maps: Mapping[str, Map]) -> dict[str, int]:
    return {name: int(bpf.info(maps[name].fd, "map_info").id) for name in _MAPS}
