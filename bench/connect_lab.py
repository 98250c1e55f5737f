# SPDX-License-Identifier: Apache-2.0
"""The lab of the measurement: two agents, one with a single Service, one with many.

Each has a node, a state directory and a cgroup of its own. The one client, in a pod, is moved from
cgroup to cgroup: the sockets that it opens there run the one agent's programs, or the other's, or
none, while process, route and backend stay the same. The servers are in the cgroup without hooks,
so that accepting costs the same for all.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

from bench import pod_program, services
from ebpflb.errors import NodeError
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.serve import status

PROGRAM = Path(pod_program.__file__)
START_TIMEOUT = 120.0  # seconds, for an agent to start
MB = 1e6


class Commanded:
    """A program that answers commands; ``do`` runs one of them."""

    def __init__(self, process: "Popen[str]") -> None:
        self.process = process

    def do(self, *command: object) -> Any:
        self.begin(*command)
        return self.answer()

    def begin(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


class Client(Commanded):
    """The client in its pod: pod_program.py."""

    def __init__(self, lab: Lab, pod: Host) -> None:
        super().__init__(lab.keep(pod.python(PROGRAM, "client", stdin=PIPE, stdout=PIPE)))

    def move(self, cgroup: Path) -> None:
        (cgroup / "cgroup.procs").write_text(str(self.process.pid))


class Start(NamedTuple):
    """The ``seconds`` until it was ready, and the ``cpu`` seconds that the agent itself used."""

    seconds: float
    cpu: float
    log: str


class MeasuredAgent:
    """One agent, its manifests, and its figures."""

    def __init__(
        self, lab: Lab, node: Host, folder: Path, backends: list[Host], *options: str
    ) -> None:
        self.agent = LabAgent(lab, node, folder, *options)
        self.cgroup = node.cgroup
        self.state = StateDir(self.agent.paths.state)
        self.texts = [services.measured(node.name, node.v4, pod.name, pod.v4) for pod in backends]
        self.serve_by(0)

    def serve_by(self, backend: int) -> int:
        """Replace the measured Service's file in one step; return CLOCK_MONOTONIC just before."""
        half = self.agent.folder / services.FILE
        half.write_text(self.texts[backend])
        begun = time.monotonic_ns()
        half.replace(self.agent.manifests / services.FILE)
        return begun

    def start(self) -> Start:
        """Start the process; return when everything is programmed."""
        before = len(self.agent.log())
        begun = time.monotonic()
        try:
            self.agent.start()
        except NodeError:  # the lab's timeout is shorter than START_TIMEOUT
            if not self._runs():
                raise
            wait_until("the agent is ready", self._programmed, START_TIMEOUT)
        took = time.monotonic() - begun
        return Start(took, self.cpu_seconds(), self.agent.log()[before:])

    def cold_start(self) -> Start:
        """Start as if it had never run here; its programs are compiled already."""
        self.agent.stop(signal.SIGKILL)
        unpin_all(self.state)
        return self.start()

    def warm_restart(self) -> Start:
        self.agent.stop()
        return self.start()

    def writes(self) -> int:
        """Return the agent's own count of map updates, which its maps keep."""
        maps = self.state.read_maps()
        try:
            return int(maps["settings"].get(0).writes)
        finally:
            for each in maps.values():
                each.close()

    def memory(self) -> dict[str, float]:
        """Rss, Pss, Anonymous and others of the agent, in MB."""
        return memory(self._pid)

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._pid)

    @property
    def _pid(self) -> int:
        assert self.agent.process is not None
        return self.agent.process.pid

    def _runs(self) -> bool:
        return self.agent.process is not None and self.agent.process.poll() is None

    def _programmed(self) -> bool:
        last = status.read(self.agent.paths)
        return bool(last and last.lists_complete)


def memory(pid: int) -> dict[str, float]:
    """Rss, Pss, Anonymous and others of a process, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name.rstrip(":"): int(size) * 1024 / MB for name, size, _ in map(str.split, lines)}


def cpu_seconds(pid: int) -> float:
    """Return user and system time: proc(5), stat, fields 14 and 15."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class ConnectLab:
    """Nodes, pods and servers, and the agents, which are not started yet."""

    def __init__(self, lab: Lab, folder: Path, stack: ExitStack) -> None:
        node, other = lab.node("one", 1), lab.node("many", 2)
        self.bare = lab.cgroup / "bare"
        self.bare.mkdir()
        self.empty = lab.cgroup / "empty"
        self.empty.mkdir()
        self.client = Client(lab, lab.pod(node, "client", 2))
        self.backends = [
            replace(lab.pod(node, f"web-{i}", 10 + i), cgroup=self.bare) for i in (1, 2)
        ]
        for pod in self.backends:
            lab.keep_ready(
                pod.python(PROGRAM, "serve", pod.name, str(services.TARGET), stdout=PIPE)
            )
        self.one = self._agent(lab, node, folder, stack.callback)
        self.many = self._agent(lab, other, folder, stack.callback)

    def _agent(
        self, lab: Lab, node: Host, folder: Path, at_end: Callable[[Callable[[], None]], object]
    ) -> MeasuredAgent:
        # Otherwise the audit attaches again what ``Hooks.off`` detaches.
        made = MeasuredAgent(lab, node, folder, self.backends, "--audit=report")
        at_end(made.agent.close)
        return made
