# SPDX-License-Identifier: Apache-2.0
"""What costs more in a larger cluster, and what does not.

    sudo .venv/bin/python -m bench.growth [--services N] [--endpoints M] [--flows F]
        [--rounds K] [--changes C]

From 1 to N Services, in powers of ten, with an agent and a fake API server for each size, of one
endpoint each; and one more agent whose Services have 1 to M endpoints. In turns, round by round:

1  the run time of connect4 for one Service's connections, and for those of any Service
2  the time from a changed EndpointSlice until a client reaches the new endpoint; where a Service
   has many endpoints one of these is replaced just before, in the same packet
3  of 1 to F connections in the flow tables, what a packet costs (see ``flow_growth``)
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench import agent, api_program, flow_growth, hooks
from bench.api_lab import ApiNode, Sizes, serve_pods
from bench.connect_lab import Client
from bench.hooks import Hooks
from bench.report import Line, Lines, Row, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.lab.hosts import Lab

PREFIX = "ebpflb-growth"
CALLS = 200  # connections a round, to each
MEASURED = (api_program.ADDRESS, api_program.PORT)
SERVICES, ENDPOINTS = "services", "endpoints"
CHANGE = "a change sent to the first answer"

Command = tuple[object, ...]


class Point(NamedTuple):
    """A measured value, and its size."""

    axis: str
    what: str
    size: int


Took = dict[Point, list[float]]


def main() -> None:
    usual = {"services": 50_000, "endpoints": 10_000, "flows": 200_000}
    run_bench(__doc__, measured_lines, **usual, rounds=20, changes=40)


def sizes_up_to(most: int) -> list[int]:
    """Return 1, 10, 100, ..., and the largest."""
    return [10**power for power in range(len(str(most))) if 10**power < most] + [most]


def measured_lines(wanted: argparse.Namespace) -> list[Line]:
    with temporary_lab(PREFIX) as (lab, folder, stack):
        rows = list(_of_clusters(GrowthLab(lab, folder, stack, wanted), wanted))
    print_step("measuring flows")
    return rows + list(flow_growth.costs(sizes_up_to(wanted.flows), wanted.rounds))


class GrowthLab:
    """``by_services``: an agent for each number of Services; ``by_endpoints``: one for them all."""

    def __init__(
        self, lab: Lab, folder: Path, stack: ExitStack, wanted: argparse.Namespace
    ) -> None:
        self.lab, self.folder, self.stack = lab, folder, stack
        first = lab.node("pods", 1)
        self.client = Client(lab, lab.pod(first, "client", 2))
        self.pods = serve_pods(lab, first)
        self.endpoint_sizes = sizes_up_to(wanted.endpoints)
        self.by_services = {
            size: self._node(number, [[size - 1, 1]])
            for number, size in enumerate(sizes_up_to(wanted.services), start=2)
        }
        last = 2 + len(self.by_services)
        self.by_endpoints = self._node(last, [[1, size] for size in self.endpoint_sizes])
        for node in self.nodes:
            print_step(f"starting {node.agent.agent.node.name}")
            node.listen()
            node.agent.start()
        for node in self.nodes:
            node.wait_for_quiet()

    @property
    def nodes(self) -> list[ApiNode]:
        return [*self.by_services.values(), self.by_endpoints]

    def _node(self, number: int, sizes: Sizes) -> ApiNode:
        node = self.lab.node(f"node-{number}", number)
        return ApiNode(self.lab, node, self.folder, self.stack, self.pods, sizes)


def _of_clusters(lab: GrowthLab, wanted: argparse.Namespace) -> Lines:
    print_step("measuring connect4")
    calls = _calls(lab, wanted.rounds)
    print_step("measuring changes")
    changes = _changes(lab, wanted.changes)
    yield "amid more Services"
    yield from _rows(calls, "ns", SERVICES)
    yield from _rows(changes, "ms", SERVICES)
    for size, node in lab.by_services.items():
        yield Row("the agent's memory", node.agent.memory()["Rss"], "MB", at=size, axis=SERVICES)
    yield "with more endpoints in the Service"
    yield from _rows(calls, "ns", ENDPOINTS)
    yield from _rows(changes, "ms", ENDPOINTS)


def _rows(took: Took, unit: str, axis: str) -> Lines:
    for point, each in sorted(took.items()):
        if point.axis == axis:
            yield row_of(point.what, each, unit, at=point.size, axis=axis)


def _calls(lab: GrowthLab, rounds: int) -> Took:
    """Return nanoseconds."""
    took: Took = defaultdict(list)
    with hooks.statistics(), ExitStack() as stack:
        agents = {node: Hooks(node.agent.state, node.agent.cgroup) for node in lab.nodes}
        for each in agents.values():
            stack.enter_context(each)
        for _ in range(rounds):
            works = list(_works(lab))
            for point, node, command in random.sample(works, k=len(works)):
                lab.client.move(node.agent.cgroup)
                ran = agents[node].per_call(partial(lab.client.do, *command))
                took[point].append(ran["connect4"])
    return took


def _works(lab: GrowthLab) -> Iterator[tuple[Point, ApiNode, Command]]:
    for size, node in lab.by_services.items():
        one = ("take_turns", [MEASURED], CALLS)
        yield Point(SERVICES, "connect4, one Service", size), node, one
        if size > 1:
            others = [_other(random.randrange(size - 1)) for _ in range(CALLS)]
            yield Point(SERVICES, "connect4, any Service", size), node, ("scatter", others)
    for number, size in enumerate(lab.endpoint_sizes):
        where = [_other(number)] * CALLS
        yield Point(ENDPOINTS, "connect4", size), lab.by_endpoints, ("scatter", where)


def _other(number: int) -> tuple[str, int]:
    return str(api_program.SERVICES + number), api_program.PORT


def _changes(lab: GrowthLab, count: int) -> Took:
    """Return milliseconds."""
    took: Took = defaultdict(list)
    works: list[tuple[Point, ApiNode, list[int]]] = [
        (Point(SERVICES, CHANGE, size), node, []) for size, node in lab.by_services.items()
    ]
    works += [
        (Point(ENDPOINTS, CHANGE, size), lab.by_endpoints, [number])
        for number, size in enumerate(lab.endpoint_sizes)
    ]
    turns = dict.fromkeys(lab.nodes, 0)
    for _ in range(count):
        for point, node, after in random.sample(works, k=len(works)):
            lab.client.move(node.agent.cgroup)
            time.sleep(agent.PAUSE * random.random())
            turns[node] += 1
            took[point].append(node.move(lab.client, turns[node] % 2, *after))
    return took


if __name__ == "__main__":
    main()
