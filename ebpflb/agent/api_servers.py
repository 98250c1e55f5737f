# SPDX-License-Identifier: Apache-2.0
"""The file of the API servers, which outlives a reboot, unlike the pinned maps."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from ebpflb import files
from ebpflb.model.api_servers import KeptApiServers

log = logging.getLogger(__name__)

_LARGEST_FILE = 1 << 16  # bytes


class ApiServersFile:
    """``on_change`` takes the API servers each time that they change, and those that were read."""

    def __init__(
        self, path: Path, on_change: Callable[[KeptApiServers], None] = lambda _: None
    ) -> None:
        self.path = path
        self._on_change = on_change
        self._last: KeptApiServers | None = None

    def read(self) -> KeptApiServers | None:
        """Return what an earlier agent has kept; None if there is nothing, or nothing usable."""
        self._last = files.decode_regular(self.path, KeptApiServers, _LARGEST_FILE)
        if self._last:
            self._on_change(self._last)
        return self._last

    def keep(self, found: KeptApiServers) -> None:
        """Write the file if the API servers have changed."""
        if found == self._last:
            return
        self._last = found
        self._on_change(found)
        try:
            files.replace(self.path, msgspec.json.encode(found))
        except OSError as error:
            log.warning("the API servers are not kept for the next start: %s", error)
