# SPDX-License-Identifier: Apache-2.0
"""What a change of an EndpointSlice costs the agent, beside a fake API server over real HTTP.

    sudo .venv/bin/python -m bench.agent_load [--services N] [--endpoints M] [--seconds S]
        [--map-size NAME=ENTRIES,...]

Slices change at 1, 10, 100, 400 and 1,000 a second, spread over all Services: in each one endpoint
is replaced by another. The agent's processor time of that while is divided by the changes; the
audit, which takes up to a twentieth of a processor whether anything changes or not, is not among
it: its first comparison is over and the next one is an hour later. Then a client connects while the
measured Service's endpoint is replaced: first alone, then among 100 other changes a second.

Everything that it makes is removed at the end, also if it is interrupted.
"""

import argparse
import random
import time
from contextlib import ExitStack
from pathlib import Path

from bench import agent, targets
from bench.api_lab import ApiNode, serve_pods
from bench.connect_lab import Client
from bench.report import Line, Lines, Row, percentile, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.lab.hosts import Lab

PREFIX = "ebpflb-load"
RATES = (1, 10, 100, 400, 1000)  # changes a second
BESIDE = (0, 100)  # other changes a second
MOVES = 100


def main() -> None:
    """Measure ``seconds`` of changes for each rate; ``map_size`` is the agent's option."""
    run_bench(__doc__, _measured, services=10_000, endpoints=100_000, seconds=10.0, map_size="")


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with temporary_lab(PREFIX) as (lab, folder, stack):
        return list(_measure(LoadLab(lab, folder, stack, wanted), wanted))


class LoadLab:
    """A node with an agent, the API server, a client and two servers."""

    def __init__(
        self, lab: Lab, folder: Path, stack: ExitStack, wanted: argparse.Namespace
    ) -> None:
        node = lab.node("load", 1)
        self.client = Client(lab, lab.pod(node, "client", 2))
        count = wanted.services - 1
        sizes = [[count, wanted.endpoints // count]]
        self.node = ApiNode(lab, node, folder, stack, serve_pods(lab, node), sizes)
        self.agent, self.api = self.node.agent, self.node.api
        self.node.listen()
        self.agent.agent.options += (f"--map-size={wanted.map_size}",)


def _measure(lab: LoadLab, wanted: argparse.Namespace) -> Lines:
    many = f"{wanted.services:,} services / {wanted.endpoints:,} endpoints"
    print_step("starting")
    started = lab.agent.start()
    lab.client.move(lab.agent.cgroup)
    yield f"agent, {many}, from an API server"
    yield Row("cold start", started.seconds, "s", None, f"CPU {started.cpu:.2f} s")
    yield agent.memory(lab.agent, "memory after it", targets.MEMORY_LARGE)
    warm = [lab.agent.warm_restart() for _ in range(agent.STARTS)]
    yield agent.start_row("warm restart", warm, targets.WARM_RESTART)
    yield agent.memory(lab.agent, "memory after the restarts", targets.MEMORY_LARGE)
    lab.node.wait_for_quiet()
    yield Row("idle, between two audits", 1e3 * lab.node.idle(), "ms CPU a second")
    for rate in RATES:
        yield _cost(lab, rate, wanted.seconds)
    yield agent.memory(lab.agent, "memory after the changes", targets.MEMORY_LARGE)
    yield "a change sent -> first answer from the new endpoint"
    for rate in BESIDE:
        yield from _latency(lab, rate)


def _cost(lab: LoadLab, rate: int, seconds: float) -> Row:
    print_step(f"{rate} changes a second")
    count = round(max(rate * seconds, 20))
    begun, cpu = time.monotonic(), lab.agent.cpu_seconds()
    lab.api.do("change", count, rate)
    _settle(lab)
    took = time.monotonic() - begun
    each = (lab.agent.cpu_seconds() - cpu) / count
    note = f"{count} changes, {count / took:.0f} a second until the last one was in force"
    target = targets.CPU_A_CHANGE if rate >= 100 else None
    return Row("CPU a change", 1e3 * each, "ms", target, note, at=rate, axis="changes a second")


def _settle(lab: LoadLab) -> None:
    """Replace the measured Service's endpoint last, and let a client wait for it."""
    lab.node.move(lab.client, 1)
    lab.node.move(lab.client, 0)


def _latency(lab: LoadLab, rate: int) -> Lines:
    print_step(f"latency beside {rate} changes a second")
    if rate:
        lab.api.do("begin", 1000 * rate, rate)
    took = []
    for turn in range(1, MOVES + 1):
        time.sleep(agent.PAUSE * (1 + random.random()))
        took.append(lab.node.move(lab.client, turn % 2))
    p99, most = percentile(took, 0.99), f"most {max(took):.1f}"
    axis = "others a second"
    yield row_of("p50", took, "ms", targets.FIRST_ANSWER_P50, at=rate, axis=axis)
    yield Row("p99", p99, "ms", targets.FIRST_ANSWER_P99, most, at=rate, axis=axis)


if __name__ == "__main__":
    main()
