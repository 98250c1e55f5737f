# SPDX-License-Identifier: Apache-2.0
"""``ebpflb monitor`` beside an agent of the lab, and the programs that are in force."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.clsact import PARENTS, Clsact
from ebpflb.kernel.attach.tcx import Tcx
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.serve import status
from tests.kit import forked


class MonitorProcess:
    """The command, with its output in files."""

    def __init__(self, agent: LabAgent, folder: Path, *words: str) -> None:
        self._out, self._err = folder / "monitor.out", folder / "monitor.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = forked.start(
                ["monitor", *agent.where, *words],
                netns=agent.node.netns,
                env=os.environ,
                stdout=out,
                stderr=err,
            )

    def begun(self) -> "MonitorProcess":
        """Return when the monitor watches."""
        wait_until("the monitor watches", lambda: "watching" in self.said() or self._ended())
        assert "watching" in self.said(), self.said()
        return self

    def _ended(self) -> bool:
        return self.process.poll() is not None

    def said(self) -> str:
        return self._err.read_text()

    def text(self) -> str:
        return self._out.read_text()

    def events(self) -> list[dict[str, Any]]:
        """Return the events printed as JSON so far, in complete lines."""
        lines = self.text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def wait_for(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first event for which the condition is true."""
        wait_until("the event", lambda: any(map(true, self.events())), 60)
        return next(filter(true, self.events()))

    def interrupt(self) -> int:
        """Send Ctrl-C; return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@contextmanager
def watching(agent: LabAgent, folder: Path, *words: str) -> Iterator[MonitorProcess]:
    """Start a monitor; it is killed in the end if it still watches."""
    monitor = MonitorProcess(agent, folder, *(words or ("-o", "json")))
    try:
        yield monitor.begun()
    finally:
        monitor.process.kill()
        monitor.process.wait(60)
        wait_until("no monitor runs", lambda: not is_monitored(agent) or not runs(agent))


def runs(agent: LabAgent) -> bool:
    return bool(agent.process and agent.process.poll() is None)


def is_monitored(agent: LabAgent) -> bool:
    """Whether the agent's status says that it is monitored."""
    found = status.read(agent.paths)
    return bool(found and found.monitor)


def programs(agent: LabAgent) -> dict[str, int]:
    """Return the ids of the programs in force, by hook, and by device and hook."""
    state = StateDir(agent.paths.state)
    tcx = Tcx(state.devices_directory)
    at_devices = {
        f"{index} {hook}": number
        for index in tcx.recorded()
        for hook, number in _ids(state, index).items()
    }
    return {**cgroup_links.attached(state), **at_devices, **_of_filters(agent, state)}


def _of_filters(agent: LabAgent, state: StateDir) -> dict[str, int]:
    """Return the programs at devices of a kernel without tcx."""

    def shown(words: str) -> list[dict[str, Any]]:
        command = [*agent.node.enter, *words.split()]
        done = subprocess.run(command, check=True, capture_output=True)
        return list(json.loads(done.stdout or "[]"))

    recorded = Clsact(state.devices_directory).recorded()
    devices = shown("ip -j link") if recorded else []
    return {
        f"{device['ifindex']} {hook}": it["options"]["prog"]["id"]
        for device in devices
        if device["ifindex"] in recorded
        for hook in PARENTS
        for it in shown(f"tc -j filter show dev {device['ifname']} {hook}")
        if "prog" in it.get("options", {})
    }


def _ids(state: StateDir, index: int) -> dict[str, int]:
    """Return the ids of programs from their links, because this process is in another network
    namespace.
    """
    found = {}
    for hook in ("ingress", "egress"):
        fd = bpf.get(str(state.devices_directory / f"{index}-{hook}"))
        if fd is not None:
            found[hook] = int(bpf.info(fd, "tcx_info").program)
            os.close(fd)
    return found
