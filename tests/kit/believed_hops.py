# SPDX-License-Identifier: Apache-2.0
"""An agent to which a test says in a file which other nodes may be handed to.

The file is JSON: a list with a node's name, its addresses ``v4`` and ``v6``, its MAC address, and
whether it is believed. It is read again when it changes.
"""

import json
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ebpflb.agent import build
from ebpflb.model.devices import Device
from ebpflb.model.hand_over import Hop, Hops


class FromFile:
    """The nodes in the file, at the device eth0."""

    def __init__(self, file: Path) -> None:
        self._file, self._read_at, self._hops = file, 0, Hops()

    def read(self, devices: tuple[Device, ...]) -> Hops:
        uplinks = [it for it in devices if it.name == "eth0"]
        if not uplinks or (written := self._file.stat().st_mtime_ns) == self._read_at:
            return self._hops
        self._read_at, listed = written, json.loads(self._file.read_text())
        believed = [
            Hop(it["node"], ip_address(it[family]), uplinks[0], _mac(it["mac"]))
            for it in listed
            if it["believed"]
            for family in ("v4", "v6")
        ]
        macs = frozenset(_mac(it["mac"]) for it in listed)
        self._hops = Hops(tuple(believed), macs, uplinks=(uplinks[0],))
        return self._hops


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def prepare(path: str) -> None:
    """Let this process's agent read the file at this path."""
    file = FromFile(Path(path))

    def hops(builder: Any) -> Hops:
        return file.read(builder._node_sync.device_list.devices)  # noqa: SLF001

    build._Builder._hops = hops  # type: ignore[assignment,method-assign]  # noqa: SLF001
