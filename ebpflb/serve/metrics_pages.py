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
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ebpflb.serve.listener import JSON, NOT_FOUND, TEXT, Handler, Request, Response
from ebpflb.serve.metrics import Exposition, Metrics
from ebpflb.version import VERSION

MODE = "ebpf"  # kube-proxy's values are iptables, ipvs or nftables

_WARNING = (
    "Warning: This endpoint is not meant to be machine parseable,"
    " has no formatting compatibility guarantees and is for debugging purposes only."
)


@dataclass(frozen=True)
class MetricsPages:
    """``configuration``, serializable by msgspec, and ``flags`` are those in force.

    ``started`` is in epoch seconds.
    """

    metrics: Metrics
    configuration: object
    flags: Mapping[str, str]
    profiling: bool = False
    started: float = field(default_factory=time.time)

    def respond(self, request: Request) -> Response:
        """Return the response of port 10249."""
        page = self._pages().get(request.path)
        return page(request) if page else NOT_FOUND

    def _pages(self) -> dict[str, Handler]:
        pages: dict[str, Handler] = {
            "/metrics": lambda request: _metrics(self.metrics.exposition(request.accept)),
            "/metrics/slis": lambda request: _metrics(self.metrics.slis_exposition(request.accept)),
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
        """Count the request, as kube-proxy does among the slis."""
        self.metrics.check("ping", "healthz", ok=True)
        return Response(200, b"ok")

    def _configz(self) -> Response:
        body = {"kubeproxy.config.k8s.io": self.configuration}
        return Response(200, msgspec.json.encode(body), JSON)

    def _flagz(self) -> Response:
        lines = [f"{name}={value}" for name, value in sorted(self.flags.items())]
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


def _metrics(exposition: Exposition) -> Response:
    return Response(200, *exposition)


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
