# SPDX-License-Identifier: Apache-2.0
"""What the choice of an endpoint costs by scheduler: the run time of connect4, against random.

    sudo .venv/bin/python -m bench.draws [--rounds K] [--calls N] [--endpoints M]

One client connects to a Service of each scheduler in turns, with and without weights, each of M
endpoints. The least of all rounds is what the program takes undisturbed; the median is beside it.
"""

import argparse
import statistics
from collections import defaultdict
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

from bench import hooks, pod_program
from bench.connect_lab import Client
from bench.report import Line, Lines, Row, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab import manifests
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.annotations import (
    RANDOM,
    SCHEDULER_ANNOTATION,
    SCHEDULERS,
    SOURCE_HASH,
    WEIGHT_ANNOTATION,
)
from ebpflb.serve import status

PROGRAM = Path(pod_program.__file__)
PORT, TARGET = 80, 8080


class Draw(NamedTuple):
    """A Service of a scheduler; with ``weight`` that of its last endpoint differs from 100."""

    scheduler: str
    weight: int
    address: str

    @property
    def name(self) -> str:
        return f"{self.scheduler}{', with weights' * (self.weight != 100)}"


DRAWS = [
    Draw(scheduler, weight, f"10.96.2.{1 + 2 * number + (weight != 100)}")
    for number, scheduler in enumerate(SCHEDULERS)
    for weight in ((100, 25) if scheduler != SOURCE_HASH else (100,))
]


def main() -> None:
    """``calls`` of each scheduler, a round."""
    run_bench(__doc__, _measured, rounds=30, calls=1000, endpoints=4)


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with temporary_lab("ebpflb-bench-draws") as (lab, folder, stack):
        client, agent = _build(lab, folder, wanted.endpoints)
        stack.callback(agent.close)
        counted = stack.enter_context(hooks.Hooks(StateDir(agent.paths.state), agent.node.cgroup))
        stack.enter_context(hooks.statistics())
        return list(_rows(client, counted, wanted))


def _build(lab: Lab, folder: Path, endpoints: int) -> tuple[Client, LabAgent]:
    node = lab.node("node", 1)
    pods = [lab.pod(node, f"pod-{i}", 10 + i, hooked=False) for i in range(endpoints)]
    for pod in pods:
        lab.keep_ready(pod.python(PROGRAM, "serve", pod.name, str(TARGET), stdout=PIPE))
    agent = LabAgent(lab, node, folder)
    objects = [each for number, draw in enumerate(DRAWS) for each in _objects(number, draw, pods)]
    manifests.write(agent.manifests / "all.yaml", [manifests.node("node", node.v4), *objects])
    agent.start()
    wait_until("all is programmed", lambda: _backends(agent) == endpoints * len(DRAWS))
    return Client(lab, lab.pod(node, "client", 2)), agent


def _backends(agent: LabAgent) -> int:
    found = status.read(agent.paths)
    return found.backends if found else 0


def _objects(number: int, draw: Draw, pods: list[Host]) -> list[manifests.Manifest]:
    service, ports = f"s{number}", [{"port": TARGET}]
    made = [manifests.endpoint(pod.v4, node="node", target=pod.name) for pod in pods]
    chosen = {SCHEDULER_ANNOTATION: draw.scheduler}
    weight = {WEIGHT_ANNOTATION: str(draw.weight)}
    last = f"{service}-last"
    return [
        manifests.service(service, [draw.address], [{"port": PORT}], annotations=chosen),
        manifests.endpoint_slice(service, "IPv4", made[:-1], ports),
        manifests.endpoint_slice(service, "IPv4", made[-1:], ports, name=last, annotations=weight),
    ]


def _rows(client: Client, counted: hooks.Hooks, wanted: argparse.Namespace) -> Lines:
    took: dict[Draw, list[float]] = defaultdict(list)
    for turn in range(wanted.rounds):
        print_step(f"round {turn + 1} of {wanted.rounds}")
        for draw in DRAWS[:: -1 if turn % 2 else 1]:
            work = partial(client.do, "take_turns", [(draw.address, PORT)], wanted.calls)
            took[draw].append(counted.per_call(work)["connect4"])
    plain = next(draw for draw in DRAWS if draw.name == RANDOM)
    rounds = f"{wanted.rounds} rounds of {wanted.calls} connections"
    yield f"connect4, {rounds} to {wanted.endpoints} endpoints"
    yield _row("random", took[plain], 0)
    for draw, costs in took.items():
        if draw != plain:
            yield _row(f"{draw.name}: more", costs, min(took[plain]))


def _row(what: str, costs: list[float], less: float) -> Row:
    """Return the row of the minimum: higher values include other work of the machine."""
    more = [cost - less for cost in costs]
    note = f"least {min(costs):.0f}, median {statistics.median(costs):.0f}"
    return row_of(what, more, "ns", note=note, value=min(more))


if __name__ == "__main__":
    main()
