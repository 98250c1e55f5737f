# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run` on a node of the lab, with its own pins, lock and manifests."""

import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from ebpflb.errors import NodeError
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir
from ebpflb.lab.hosts import Host, Lab, Process, start
from ebpflb.options import Paths
from ebpflb.serve import status


def wait_until(what: str, true: Callable[[], bool], seconds: float = 240.0) -> float:
    """Poll until ``true`` returns true; return the seconds. Raises NodeError if it never does.

    The intervals grow, so that polling leaves the CPU to the program that is waited for.
    """
    begun = time.monotonic()
    while not true():
        passed = time.monotonic() - begun
        if passed > seconds:
            raise NodeError(f"timeout after {seconds:g} s: {what}")
        time.sleep(min(0.2, max(0.002, passed / 20)))
    return time.monotonic() - begun


class LabAgent:
    """One node's agent with its directories; ``close`` removes them all.

    ``under`` is a command that starts the agent, such as setpriv(1) with fewer rights; ``defaults``
    are options that ``options`` override.
    """

    under: Sequence[str] = ()
    defaults: Sequence[str] = ()

    def __init__(self, lab: Lab, node: Host, folder: Path, *options: str) -> None:
        self.lab, self.node, self.options = lab, node, options
        self.folder = folder / node.name
        self.manifests = self.folder / "manifests"
        self.manifests.mkdir(parents=True)
        self.paths = Paths(BPFFS / f"{lab.prefix}-{node.name}", self.folder / "run")
        self.log_file = self.folder / "log"
        self.process: Process | None = None

    def start(self) -> None:
        """Start the agent; return when everything is programmed, and all devices have programs."""
        self.begin()
        try:
            wait_until(f"{self.node.name}'s agent is ready", self._ready)
        except NodeError as error:
            raise NodeError(f"{error}; its log:\n{self.log()}") from error

    def begin(self) -> None:
        """Start the agent without waiting."""
        self.paths.status_file.unlink(missing_ok=True)
        arguments = ["--node-name", self.node.name, "--cgroup-root", str(self.node.cgroup)]
        if not {"--kubeconfig", "--master"} & {*self.options}:
            arguments += ["--manifests", str(self.manifests)]
        with self.log_file.open("a") as log:
            words = ["run", *self.where, *arguments, *self.defaults, *self.options]
            self.process = self.lab.keep(self.spawn(words, log))

    def spawn(self, words: Sequence[str], log: IO[str]) -> Process:
        """Start a process that runs ``ebpflb`` with these words on the node."""
        command = [*self.under, sys.executable, "-P", "-m", "ebpflb", *words]
        return start(self.node.netns, self.lab.cgroup, command, stdout=log, stderr=log)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop the agent with SIGTERM or SIGKILL; programs and maps stay."""
        if self.process:
            self.process.send_signal(how)
            self.process.wait()

    def log(self) -> str:
        """Return the log of the agent so far."""
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def where(self) -> list[str]:
        """Return the options by which other commands find this agent's directories."""
        return ["--state-dir", str(self.paths.state), "--run-dir", str(self.paths.run)]

    def close(self) -> None:
        self.stop(signal.SIGKILL)
        unpin_all(StateDir(self.paths.state))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ready(self) -> bool:
        if self.process and self.process.poll() is not None:
            raise NodeError(f"{self.node.name}'s agent ended: {self.log()}")
        last = status.read(self.paths)
        if not last or not last.lists_complete:
            return False
        return not last.sync_error and not last.devices_to_come
