# SPDX-License-Identifier: Apache-2.0
"""One GET over a connected socket, by HTTP/1.0: the answer ends where the server closes.

``http.client`` takes 15 ms to import, with TLS and the headers of mail, at each start of a command.
"""

import errno
import re
import socket
import time

_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})\b")
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]{1,15})", re.IGNORECASE)
_PART = 65536  # bytes


class NoHttp(Exception):
    """The answer is not HTTP."""


def get(opened: socket.socket, path: str, seconds: float, limit: int) -> tuple[int, bytes]:
    """The status and the body of the answer, which has ``limit`` bytes at most and arrives in time.

    Raises NoHttp, and OSError: TimeoutError, or ConnectionError if the answer ends too early.
    """
    until = time.monotonic() + seconds
    opened.sendall(f"GET {path} HTTP/1.0\r\nHost: ebpflb\r\n\r\n".encode("ascii"))
    answer = bytearray()
    while len(answer) < limit and (part := _receive(opened, until)):
        answer += part
    head, _, body = bytes(answer[:limit]).partition(b"\r\n\r\n")
    status = _STATUS.match(head)
    if not status:
        raise NoHttp
    length = _LENGTH.search(head)
    if length and len(answer) < limit and len(body) < int(length[1]):
        raise ConnectionError(errno.ECONNABORTED, "the answer ends too early")
    return int(status[1]), body


def _receive(opened: socket.socket, until: float) -> bytes:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    opened.settimeout(left)
    return opened.recv(_PART)
