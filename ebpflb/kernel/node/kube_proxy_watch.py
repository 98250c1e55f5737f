# SPDX-License-Identifier: Apache-2.0
"""Detect a kube-proxy in this network namespace, or its leftovers (kube-proxy.md 13.2, 17).

A kube-proxy is detected by its process, which is invisible inside a pod; by a program that answers
/proxyMode on loopback with a mode of kube-proxy, which may be part of another program, as in k3s;
or by its rules, if they return after they were gone.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

from ebpflb import http_get
from ebpflb.kernel.node import kube_proxy_leftovers, process
from ebpflb.model.events import SourceStatus
from ebpflb.model.kube_proxy import PROXY_MODE_PORT, PROXY_MODES, Detection
from ebpflb.workers import PeriodicWorker, Poller

_NAME = "kube-proxy"
_INTERVAL_SECONDS = 60.0
_LOOPBACKS = ("127.0.0.1", "::1")
TIMEOUT = 1.0  # seconds
_MOST_BYTES = 4096  # of an answer, with its head


def detect() -> Detection:
    """Return everything that can be detected now. Raises NodeError if something cannot be read."""
    answers = tuple(_proxy_modes())
    rules = tuple(kube_proxy_leftovers.visible_rules())
    unseen = not process.sees_the_machine()
    return Detection(tuple(sorted(_pids())), answers, rules, unseen=unseen)


class KubeProxyWatch(PeriodicWorker):
    """Emit the first detection at once, and then every one that differs from the last.

    While something cannot be read the last detection stays.
    """

    patience = 0.0  # what is read may take seconds, and changes nothing

    def __init__(
        self, emit: Callable[[Detection | SourceStatus], None], seconds: float = _INTERVAL_SECONDS
    ) -> None:
        super().__init__(_NAME, seconds, steady=True)
        self.emit = emit
        self._poll = Poller(_NAME, self._report, emit)
        self._reported: Detection | None = None

    def turn(self) -> None:
        self._poll()

    def _report(self) -> None:
        found = detect().compared_with(self._reported)
        if found != self._reported:
            self._reported = found
            self.emit(found)


def _pids() -> Iterator[int]:
    """Yield kube-proxy's processes in this network namespace: a machine may have several nodes."""
    here = _netns("/proc/self")
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # the process has ended, or may not be read
            if _is_kube_proxy(entry.path) and _netns(entry.path) == here:
                yield int(entry.name)


def _is_kube_proxy(folder: str) -> bool:
    with open(f"{folder}/comm", "rb", buffering=0) as file:
        if file.read().strip() == _NAME.encode():
            return True
    return os.path.basename(os.readlink(f"{folder}/exe")) == _NAME


def _netns(folder: str) -> int:
    return os.stat(f"{folder}/ns/net").st_ino


def _proxy_modes() -> Iterator[tuple[str, str]]:
    """Yield addresses and modes of programs that answer as kube-proxy; ebpflb answers "ebpf"."""
    for address in _LOOPBACKS:
        mode = _proxy_mode(address)
        if mode in PROXY_MODES:
            where = f"[{address}]" if ":" in address else address
            yield f"{where}:{PROXY_MODE_PORT}", mode


def _proxy_mode(address: str) -> str:
    try:
        with socket.create_connection((address, PROXY_MODE_PORT), TIMEOUT) as connection:
            _, body = http_get.get(connection, "/proxyMode", _MOST_BYTES)
    except (OSError, ValueError):
        return ""
    return body.decode("ascii", "replace").strip()
