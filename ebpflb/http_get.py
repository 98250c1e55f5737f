# SPDX-License-Identifier: Apache-2.0
"""One GET by HTTP/1.0 over a connected socket.

For servers on this node. ``http.client`` could do it too, but importing it takes 10 ms.
"""

import re
from socket import socket

_HEAD_END = b"\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")


def get(connection: socket, path: str, most: int = -1) -> tuple[int, bytes]:
    """Return the status and body of the answer; ``most`` limits the bytes, with the head.

    Raises OSError, and ValueError for an answer that is not HTTP.
    """
    connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    with connection.makefile("rb") as answer:
        head, _, body = answer.read(most).partition(_HEAD_END)
    status = _STATUS_LINE.match(head)
    if not status:
        raise ValueError("the answer is not HTTP")
    return int(status[1]), body
