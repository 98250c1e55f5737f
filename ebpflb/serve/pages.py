# SPDX-License-Identifier: Apache-2.0
"""The pages of 10249, for those who watch the agent (kube-proxy.md 13.2).

/flagz and /statusz look as kube-proxy's do. With --profiling there is /debug/stacks, which says
where every thread is just now; kube-proxy's /debug/pprof profiles Go and has no counterpart.
"""

import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import msgspec

from ebpflb.serve.http import JSON, NOT_FOUND, TEXT, Request, Response

MODE = "ebpf"  # where kube-proxy says iptables, ipvs or nftables

Exposition = Callable[[str], tuple[bytes, str]]
"""From an Accept header to a body and its Content-Type."""

_WARNING = (
    "Warning: This endpoint is not meant to be machine parseable,"
    " has no formatting compatibility guarantees and is for debugging purposes only."
)


@dataclass(frozen=True)
class Pages:
    """``configuration`` and ``flags`` are those in force; ``metrics`` and ``slis`` are scraped.

    ``on_ping`` is told of each request for /healthz: kube-proxy counts it among the slis.
    """

    metrics: Exposition
    slis: Exposition
    configuration: Callable[[], Any]  # what msgspec can write
    flags: Callable[[], Mapping[str, str]]
    on_ping: Callable[[], None] = lambda: None
    profiling: bool = False
    started: float = field(default_factory=time.time)

    def respond(self, request: Request) -> Response:
        """What 10249 says."""
        page = self._pages().get(request.path)
        return page(request) if page else NOT_FOUND

    def _pages(self) -> dict[str, Callable[[Request], Response]]:
        debugging = {"/debug/stacks": _stacks} if self.profiling else {}
        return {
            "/metrics": lambda request: _scraped(self.metrics, request),
            "/metrics/slis": lambda request: _scraped(self.slis, request),
            "/healthz": lambda _: self._healthz(),
            "/proxyMode": lambda _: Response(200, MODE.encode()),
            "/configz": lambda _: self._configz(),
            "/flagz": lambda _: self._flagz(),
            "/statusz": lambda _: self._statusz(),
            **debugging,
        }

    def _healthz(self) -> Response:
        self.on_ping()
        return Response(200, b"ok")

    def _configz(self) -> Response:
        said = {"kubeproxy.config.k8s.io": self.configuration()}
        return Response(200, msgspec.json.encode(said), JSON)

    def _flagz(self) -> Response:
        said = [f"{name}={value}" for name, value in sorted(self.flags().items())]
        return _page("flags", ["", *said])

    def _statusz(self) -> Response:
        up = int(time.time() - self.started)
        lines = [
            "",
            f"Started: {time.strftime('%a %b %e %H:%M:%S UTC %Y', time.gmtime(self.started))}",
            f"Up: {up // 3600} hr {up // 60 % 60:02} min {up % 60:02} sec",
            f"Python version: {platform.python_version()}",
            f"Binary version: {metadata.version('ebpflb')}",
            f"Paths: {' '.join(sorted(self._pages()))}",
        ]
        return _page("statusz", lines)


def _scraped(exposition: Exposition, request: Request) -> Response:
    body, kind = exposition(request.accept)
    return Response(200, body, kind)


def _page(name: str, lines: list[str]) -> Response:
    said = ["", f"ebpflb {name}", _WARNING, *lines, ""]
    return Response(200, "\n".join(said).encode())


def _stacks(_: Request) -> Response:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    said = [
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}\n"
        for ident, frame in sys._current_frames().items()
    ]
    return Response(200, "".join(said).encode(), TEXT)
