# SPDX-License-Identifier: Apache-2.0
"""A first start on a node with many devices, and what they cost the agent afterwards.

    sudo .venv/bin/python -m bench.devices [--devices N] [--pairs M]

N veth devices, whose other ends are in one network namespace, are there when the agent starts for
the first time. From when it is ready until every device has programs an endpoint is replaced again
and again while a client connects. Then nothing happens for some seconds; then M pods' pairs of
devices are made and removed, and the agent's processor time of that is divided by M.
"""

import argparse
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

from bench import agent, services, targets
from bench.connect_lab import PROGRAM, Client, MeasuredAgent
from bench.report import Line, Lines, Row, percentile, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.netns import Namespace
from ebpflb.serve import status

PREFIX = "ebpflb-devices"
IDLE = 10.0  # seconds
QUIET = 0.008  # processor seconds a second: the audit does not read the maps
CHANGES = 200
PAUSE = 0.3  # seconds between two pods
BATCH = 100  # devices that one ip(8) makes


def main() -> None:
    run_bench(__doc__, _measured, devices=500, pairs=30)


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with temporary_lab(PREFIX) as (lab, folder, stack):
        return list(_measure(DevicesLab(lab, folder, stack, wanted.devices), wanted))


class DevicesLab:
    """A node with devices, and an agent that is not started yet."""

    def __init__(self, lab: Lab, folder: Path, stack: ExitStack, devices: int) -> None:
        self.node: Host = lab.node("node", 1)
        self.client = Client(lab, lab.pod(self.node, "client", 2))
        self.pods = [lab.pod(self.node, f"web-{i}", 10 + i, hooked=False) for i in (1, 2)]
        for pod in self.pods:
            words = "serve", pod.name, str(services.TARGET)
            lab.keep_ready(pod.python(PROGRAM, *words, stdout=PIPE))
        self.other_ends = Namespace(f"{PREFIX}-ends")
        self.other_ends.create(lab.cgroup)
        for first in range(0, devices, BATCH):
            self.add(*range(first, min(first + BATCH, devices)))
        options = ["--iptables-sync-period=1h"]
        self.agent = MeasuredAgent(lab, self.node, folder, self.pods, *options)
        stack.callback(self.agent.agent.close)

    def add(self, *numbers: int) -> None:
        peer = f"netns {self.other_ends.netns}"
        self.node.ip(*(f"link add d{i} type veth peer name d{i} {peer}" for i in numbers))
        self.node.ip(*(f"link set d{i} up" for i in numbers))

    def remove(self, number: int) -> None:
        self.node.ip(f"link del d{number}")

    def change(self, turn: int) -> float:
        """Return the milliseconds until the client reaches the other endpoint."""
        self.client.begin("wait_for", (services.ADDRESS, services.PORT), self.pods[turn % 2].name)
        self.client.answer()
        time.sleep(agent.PAUSE)
        begun = self.agent.serve_by(turn % 2)
        return float(self.client.answer() - begun) / agent.MS

    def idle(self) -> float:
        """Return processor seconds per second."""
        begun, cpu = time.monotonic(), self.agent.cpu_seconds()
        time.sleep(IDLE)
        return (self.agent.cpu_seconds() - cpu) / (time.monotonic() - begun)

    def forget(self) -> None:
        """End the agent, and remove what it leaves."""
        self.agent.agent.stop(signal.SIGKILL)
        unpin_all(self.agent.state)
        self.agent.agent.paths.status_file.unlink()

    @property
    def is_ready(self) -> bool:
        """Whether the node is served: pods' devices may be without programs."""
        last = status.read(self.agent.agent.paths)
        return bool(last and last.attached and last.in_sync)


def _measure(lab: DevicesLab, wanted: argparse.Namespace) -> Lines:
    print_step("starting for the bytecode")
    lab.agent.start()
    lab.client.move(lab.agent.cgroup)
    print_step("starting for the first time")
    lab.forget()
    yield f"first start, {wanted.devices} devices"
    took: list[float] = []
    with ThreadPoolExecutor(1) as beside:
        starting = beside.submit(lab.agent.start)
        ready = wait_until("the agent is ready", lambda: lab.is_ready)
        cpu = f"CPU {lab.agent.cpu_seconds():.2f} s"
        yield Row("ready", ready, "s", targets.DEVICES_START, cpu)
        while not starting.done():
            took.append(lab.change(len(took) + 1))
    last = starting.result()
    yield Row("every device has programs", last.seconds, "s", None, f"CPU {last.cpu:.2f} s")
    yield from _changes("a change meanwhile", took, targets.DEVICES_CHANGE)
    later = [lab.change(len(took) + turn) for turn in range(1, CHANGES + 1)]
    yield from _changes("a change afterwards", later)
    yield from _afterwards(lab, wanted)


def _changes(what: str, took: list[float], target: float | None = None) -> Lines:
    if took:
        yield row_of(f"{what}, p50", took, "ms", target)
        yield Row("  p99", percentile(took, 0.99), "ms", None, f"most {max(took):.1f}")


def _afterwards(lab: DevicesLab, wanted: argparse.Namespace) -> Lines:
    print_step("idle")
    wait_until("the first audit has ended", lambda: lab.idle() < QUIET)
    idle = lab.idle()
    yield Row("idle", 1e3 * idle, "ms CPU a second", targets.DEVICES_IDLE)
    yield agent.memory(lab.agent, "memory", targets.MEMORY_IDLE)
    print_step("pods' pairs")
    begun, cpu = time.monotonic(), lab.agent.cpu_seconds()
    for number in range(wanted.devices, wanted.devices + wanted.pairs):
        lab.add(number)
        time.sleep(PAUSE)
        lab.remove(number)
        time.sleep(PAUSE)
    used = lab.agent.cpu_seconds() - cpu - idle * (time.monotonic() - begun)
    pair = 1e3 * used / wanted.pairs
    yield Row("a pod's pair of devices", pair, "ms CPU", targets.DEVICES_PAIR)


if __name__ == "__main__":
    main()
