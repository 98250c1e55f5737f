# SPDX-License-Identifier: Apache-2.0
"""Is there a kube-proxy in this network namespace, or what one left? (kube-proxy.md 13.2, 17)

A process is seen only where we see the node's processes; in a pod we see what listens: whoever
answers /proxyMode on loopback with a mode of kube-proxy's is one, also where it is part of
another program, as in k3s. And whoever writes its rules anew is one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from ebpflb.model.events import SourceStatus
from ebpflb.model.kube_proxy import METRICS_PORT, MODES, Detection
from ebpflb.node import kube_proxy_leftovers
from ebpflb.node.poller import Poller

NAME = "kube-proxy"
INTERVAL_SECONDS = 60.0
_LOOPBACKS = ("127.0.0.1", "::1")
_TIMEOUT = 1.0  # seconds
_LONGEST = 32  # bytes of an answer


def detect() -> Detection:
    """What can be seen now. Raises NodeError where something cannot be looked at."""
    answers = tuple(_proxy_modes())
    return Detection(tuple(sorted(_pids())), answers, tuple(kube_proxy_leftovers.visible_rules()))


class KubeProxyWatch:
    """Tells what there is at once, and then each time that it is something else.

    What cannot be looked at is as it was.
    """

    def __init__(
        self, emit: Callable[[Detection | SourceStatus], None], seconds: float = INTERVAL_SECONDS
    ) -> None:
        self.emit = emit
        self.seconds = seconds
        self._poll = Poller(NAME, self._report, emit)
        self._ended = threading.Event()
        self._reported: Detection | None = None

    def start(self) -> None:
        """The first look comes before it returns."""
        self._poll()
        threading.Thread(target=self._watch, name=NAME, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self.seconds):
            self._poll()

    def _report(self) -> None:
        found = detect().compared_with(self._reported)
        if found != self._reported:
            self._reported = found
            self.emit(found)


def _pids() -> Iterator[int]:
    """Its processes that live in our network namespace: a machine may hold several nodes."""
    here = _netns(Path("/proc/self"))
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or may not be looked at
            if _is_kube_proxy(process) and _netns(process) == here:
                yield int(process.name)


def _is_kube_proxy(process: Path) -> bool:
    if (process / "comm").read_text().strip() == NAME:
        return True
    return (process / "exe").readlink().name == NAME


def _netns(process: Path) -> int:
    return (process / "ns" / "net").stat().st_ino


def _proxy_modes() -> Iterator[tuple[str, str]]:
    """Who says to be one: ebpflb itself says "ebpf" there."""
    for address in _LOOPBACKS:
        mode = _proxy_mode(address)
        if mode in MODES:
            where = f"[{address}]" if ":" in address else address
            yield f"{where}:{METRICS_PORT}", mode


def _proxy_mode(address: str) -> str:
    asking = HTTPConnection(address, METRICS_PORT, timeout=_TIMEOUT)
    try:
        asking.request("GET", "/proxyMode")
        return asking.getresponse().read(_LONGEST).decode("ascii", "replace").strip()
    except (OSError, HTTPException):
        return ""
    finally:
        asking.close()
