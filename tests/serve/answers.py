# SPDX-License-Identifier: Apache-2.0
"""What the doors of test_clients and test_requests answer."""

import threading

from ebpflb.serve.http import Answer, Request

RELEASE = threading.Event()  # lets /slow come to an end
BIG = 8 << 20  # more than the kernel's buffers take


def respond(request: Request) -> Answer:
    if request.path == "/big":
        return Answer(200, b"x" * BIG)
    if request.path == "/slow":
        RELEASE.wait()
    return Answer(200, request.path.encode())
