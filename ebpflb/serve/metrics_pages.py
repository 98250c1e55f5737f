# SPDX-License-Identifier: Apache-2.0
"""Port 10249: metrics, and pages for debugging (kube-proxy.md 13.2).

/flagz and /statusz have kube-proxy's format. With --profiling, /debug/stacks shows the stack of
every thread; kube-proxy's /debug/pprof profiles Go and has no counterpart.
"""

import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ebpflb.serve.listener import JSON, NOT_FOUND, TEXT, Handler, Request, Response
from ebpflb.version import VERSION

MODE = "ebpf"  # kube-proxy's values are iptables, ipvs or nftables

Expose = Callable[[str], tuple[bytes, str]]
"""From an Accept header to a body and its Content-Type."""

_WARNING = (
    "Warning: This endpoint is not meant to be machine parseable,"
    " has no formatting compatibility guarantees and is for debugging purposes only."
)


@dataclass(frozen=True)
class MetricsPages:
    """``configuration`` and ``flags`` return those in force; ``started`` is in epoch seconds.

    ``on_ping`` is called at each request for /healthz, which kube-proxy counts among the slis.
    """

    metrics: Expose
    slis: Expose
    configuration: Callable[[], Any]  # serializable by msgspec
    flags: Callable[[], Mapping[str, str]]
    on_ping: Callable[[], None] = lambda: None
    profiling: bool = False
    started: float = field(default_factory=time.time)

    def respond(self, request: Request) -> Response:
        """Return the response of port 10249."""
        page = self._pages().get(request.path)
        return page(request) if page else NOT_FOUND

    def _pages(self) -> dict[str, Handler]:
        pages: dict[str, Handler] = {
            "/metrics": lambda request: _metrics(self.metrics, request),
            "/metrics/slis": lambda request: _metrics(self.slis, request),
            "/healthz": lambda _: self._healthz(),
            "/proxyMode": lambda _: Response(200, MODE.encode()),
            "/configz": lambda _: self._configz(),
            "/flagz": lambda _: self._flagz(),
            "/statusz": lambda _: self._statusz(),
        }
        if self.profiling:
            pages["/debug/stacks"] = lambda _: Response(200, "\n".join(stacks()).encode(), TEXT)
        return pages

    def _healthz(self) -> Response:
        self.on_ping()
        return Response(200, b"ok")

    def _configz(self) -> Response:
        body = {"kubeproxy.config.k8s.io": self.configuration()}
        return Response(200, msgspec.json.encode(body), JSON)

    def _flagz(self) -> Response:
        lines = [f"{name}={value}" for name, value in sorted(self.flags().items())]
        return _page("flags", ["", *lines])

    def _statusz(self) -> Response:
        up = int(time.time() - self.started)
        lines = [
            "",
            f"Started: {time.strftime('%a %b %e %H:%M:%S UTC %Y', time.gmtime(self.started))}",
            f"Up: {up // 3600} hr {up // 60 % 60:02} min {up % 60:02} sec",
            f"Python version: {platform.python_version()}",
            f"Binary version: {VERSION}",
            f"Paths: {' '.join(sorted(self._pages()))}",
        ]
        return _page("statusz", lines)


def _metrics(exposition: Expose, request: Request) -> Response:
    body, content_type = exposition(request.accept)
    return Response(200, body, content_type)


def _page(name: str, lines: list[str]) -> Response:
    text = ["", f"ebpflb {name}", _WARNING, *lines, ""]
    return Response(200, "\n".join(text).encode())


def stacks() -> list[str]:
    """Return the name and the stack of every thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()  # noqa: SLF001
    ]
