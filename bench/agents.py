# SPDX-License-Identifier: Apache-2.0
"""Many agents at one API server: what each costs, and what all cost the server.

    sudo .venv/bin/python -m bench.agents [--agents N] [--services N] [--seconds S]

First a hundredth of the agents start, then a tenth, then all, beside the former ones; each time all
of the new ones at once. They watch and plan without a kernel (see ``agents_program``). Then pods
are replaced as in ``programming``. All agents together handle 300 changes a second, which is about
what two CPUs can do: with 100 agents, 3 pods are replaced per second.

The server counts the bytes of HTTP bodies. An agent's processor time includes the kernel's work for
its sockets. The agents are forked from one process; "private" is
the memory that an agent does not share with others. It includes the maps, which on a node belong to
the kernel. The server is a fake one: it sends as many bytes as a real one, but its processor time
only shows how the load grows with the number of agents.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from subprocess import PIPE
from typing import NamedTuple

from bench import agents_program
from bench.api_lab import NodeApi
from bench.connect_lab import Commanded, cpu_seconds, memory
from bench.page import ROOT
from bench.programming import load_sizes
from bench.report import Lines, Row
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.serve import status

PREFIX = "ebpflb-agents"
SHARES = 100, 10, 1  # of the agents: stages
FOLLOWED = 300.0  # changes a second, by all agents together
PAUSE = 3.0  # seconds: whether agents are quiet, and how much they use then
QUIET = 0.002  # processor seconds a second, of each
SECONDS = 600.0  # at most, until all agents follow
AXIS = "agents"
KB, MB = 1e3, 1e6


class Served(NamedTuple):
    service_ports: int
    backends: int


class Used(NamedTuple):
    """The bytes sent by the server, and the processor seconds of the server and of all agents."""

    sent: int
    server: float
    agents: float


class Agents(Commanded):
    """Agents' processes in a namespace; ``services`` and ``pods`` are what each serves."""

    def __init__(self, lab: Lab, node: Host, api: NodeApi, folder: Path, wanted: Served) -> None:
        words = ["-m", "bench.agents_program", api.url, str(folder)]
        command = ["nice", "-n", "10", sys.executable, *words]
        super().__init__(lab.keep(node.start(command, stdin=PIPE, stdout=PIPE, cwd=str(ROOT))))
        self.api, self.pids, self.folder, self.wanted = api.api, list[int](), folder, wanted

    def start(self, count: int) -> None:
        self.pids = self.do(count - len(self.pids))
        wait_until("all agents serve", lambda: all(map(self._serves, range(count))), SECONDS)
        self.wait_for_quiet()

    def end(self) -> None:
        """End the agents before the server, whose end they would report."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)

    def _serves(self, number: int) -> bool:
        last = status.read(agents_program.paths(self.folder, number))
        return last is not None and self.wanted == (last.service_ports, last.backends)

    def used(self) -> Used:
        watches, sent, server = self.api.do("load")
        if watches not in (0, len(self.pids)):
            raise SystemExit(f"{watches} of {len(self.pids)} agents watch EndpointSlices")
        if wrong := [i for i in range(len(self.pids)) if not self._serves(i)]:
            raise SystemExit(f"of {len(self.pids)} agents {len(wrong)} do not serve everything")
        return Used(sent, server, sum(map(cpu_seconds, self.pids)))

    def wait_for_quiet(self) -> None:
        wait_until("the agents have nothing to do", lambda: self.idle() < QUIET, SECONDS)

    def idle(self) -> float:
        """Return each agent's processor seconds per second."""
        before = sum(map(cpu_seconds, self.pids))
        time.sleep(PAUSE)
        return (sum(map(cpu_seconds, self.pids)) - before) / PAUSE / len(self.pids)


def main() -> None:
    """Measure ``seconds`` of each roll-out."""
    run_bench(__doc__, _measured, agents=100, services=1000, seconds=60.0)


def _measured(wanted: argparse.Namespace) -> Lines:
    sizes = load_sizes(wanted.services)
    pods = sum(services * size for services, size in sizes)
    starts, roll_outs = list[Row](), list[Row]()
    with temporary_lab(PREFIX) as (lab, folder, stack):
        node = lab.node("node-1", 1)
        api = NodeApi(lab, node, folder, [node], sizes)
        api.listen()
        agents = Agents(lab, node, api, folder, Served(wanted.services + 1, pods + 1))
        stack.callback(agents.end)
        for count in filter(None, (wanted.agents // share for share in SHARES)):
            starts += _start(agents, count)
            roll_outs += _roll_out(agents, wanted.seconds)
    yield f"start beside {wanted.services:,} Services with {pods:,} pods"
    yield from starts
    yield "a pod is replaced"
    yield from roll_outs


def _start(agents: Agents, count: int) -> Iterator[Row]:
    print_step(f"starting {count} agents")
    before, new = agents.used(), count - len(agents.pids)
    agents.start(count)
    after = agents.used()
    yield _row("bytes to each", (after.sent - before.sent) / new / MB, "MB", count)
    yield _row("CPU of each", (after.agents - before.agents) / new, "s", count)
    yield _row("the server's CPU for each", (after.server - before.server) / new, "s", count)
    sizes = [memory(pid) for pid in agents.pids]
    private = [each["Private_Clean"] + each["Private_Dirty"] for each in sizes]
    note = f"most {max(private):.0f}; Pss {mean(each['Pss'] for each in sizes):.0f}"
    yield _row("private memory of each", mean(private), "MB", count, note)
    yield _row("idle: CPU of each a second", 1e3 * agents.idle(), "ms", count)


def _roll_out(agents: Agents, seconds: float) -> Iterator[Row]:
    count = len(agents.pids)
    rate = FOLLOWED / count
    pods = round(rate * seconds)
    print_step(f"replacing {pods} pods, {rate:g} a second")
    before = agents.used()
    agents.api.do("change", pods, rate)
    agents.wait_for_quiet()
    after, note = agents.used(), f"{pods} pods, {rate:g} a second"
    sent, served = after.sent - before.sent, after.server - before.server
    used = after.agents - before.agents
    yield _row("bytes to each", sent / pods / count / KB, "kB", count, note)
    yield _row("CPU of each", 1e3 * used / pods / count, "ms", count)
    yield _row("the server's CPU for each", 1e3 * served / pods / count, "ms", count)


def _row(what: str, value: float, unit: str, agents: int, note: str = "") -> Row:
    return Row(what, value, unit, None, note, at=agents, axis=AXIS)


if __name__ == "__main__":
    main()
