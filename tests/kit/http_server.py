# SPDX-License-Identifier: Apache-2.0
"""HTTP servers of tests, which print nothing: what they printed would be output of a later test."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """``with Server(address, handler):`` serves until the end of the block.

    A client may leave at any time, even after the end of its test.
    """

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)
