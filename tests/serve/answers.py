# SPDX-License-Identifier: Apache-2.0
"""The handler for the listeners of test_clients and test_requests."""

import threading

from ebpflb.serve.listener import Request, Response

RELEASE = threading.Event()  # lets /slow come to an end
BIG = 8 << 20  # more than the kernel's buffers take


def respond(request: Request) -> Response:
    if request.path == "/big":
        return Response(200, b"x" * BIG)
    if request.path == "/slow":
        RELEASE.wait()
    return Response(200, request.path.encode())
