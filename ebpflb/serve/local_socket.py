# SPDX-License-Identifier: Apache-2.0
"""HTTP over a socket in the run directory: the agent's answers to commands on this node.

Only root may connect. Requests are answered one after the other in a thread, so neither the agent's
loop nor the other ports wait for them. Whether the agent runs is answered at once.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ebpflb import unix_socket
from ebpflb.errors import in_words
from ebpflb.serve.listener import Connections, Handler, Listener

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
_TIMEOUT_SECONDS = 10.0


class LocalSocket:
    """The socket; if it cannot listen, the agent continues without it."""

    def __init__(
        self,
        path: Path,
        handler: Handler,
        timeout: float = _TIMEOUT_SECONDS,
        quick: Mapping[str, Handler] = {},
    ) -> None:
        """``quick``: handlers by their path that take no time, and wait for no other request."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, "inspect")
        connections = Connections(MAX_CONNECTIONS, timeout)
        self._listener = Listener(handler, connections, slow=self._thread, quick=quick)

    async def open(self) -> None:
        """Open the socket, replacing that of an earlier agent."""
        try:
            await self._listener.open(unix_socket.listen(self._path))
        except OSError as error:
            log.warning("%s: %s: commands will ask the maps alone", self._path, in_words(error))

    async def close(self) -> None:
        """Close the socket.

        Raises OSError if its file cannot be removed, after everything else is done.
        """
        try:
            await self._listener.close()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._path.unlink(missing_ok=True)
