# SPDX-License-Identifier: Apache-2.0
"""What each scheduler means for clients where one endpoint is slower than the others.

A client opens connections at random times, whatever is answered; each endpoint answers one after
the other. The schedulers take turns, with the same times of arrival in a turn.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

from bench import queue_program
from bench.report import Line, Lines, percentile, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.lab import manifests
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.annotations import (
    SCHEDULER_ANNOTATION,
    SCHEDULERS,
    SOURCE_HASH,
    WEIGHT_ANNOTATION,
)
from ebpflb.serve import status

PROGRAM = Path(queue_program.__file__)
PORT, TARGET = 80, 8080
FAST, SLOW = 2, 8  # milliseconds an answer
ENDPOINTS = 4  # of which the last one is slow
RATE = 400  # connections a second: random gives the slow endpoint 0.8 of what it can do
BY_WEIGHT = "random, slow at weight 25"


class Way(NamedTuple):
    """A Service whose connections go by a scheduler, with the slow endpoint's weight."""

    name: str
    scheduler: str
    address: str
    weight: int = 100


# One client meets one endpoint by source-hash: there is nothing to compare.
WAYS = [
    *(
        Way(name, name, f"10.96.1.{n}")
        for n, name in enumerate(SCHEDULERS, 1)
        if name != SOURCE_HASH
    ),
    Way(BY_WEIGHT, "random", "10.96.1.100", 100 * FAST // SLOW),
]


def main() -> None:
    """Measure ``seconds`` of each scheduler, a round."""
    run_bench(__doc__, _measured, rounds=5, seconds=8.0)


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with temporary_lab("ebpflb-bench-schedulers") as (lab, folder, stack):
        client, agent = _build(lab, folder)
        stack.callback(agent.close)
        return list(_rows(_measure(client, wanted)))


def _build(lab: Lab, folder: Path) -> tuple[Host, LabAgent]:
    node = lab.node("node", 1)
    client, pods = lab.pod(node, "client", 2), [lab.pod(node, f"pod-{i}", 10 + i) for i in range(4)]
    for number, pod in enumerate(pods, 1):
        words = ("serve", str(TARGET), str(SLOW if number == ENDPOINTS else FAST))
        lab.keep_ready(pod.python(PROGRAM, *words, stdout=PIPE))
    agent = LabAgent(lab, node, folder)
    objects = [each for number, way in enumerate(WAYS) for each in _objects(number, way, pods)]
    manifests.write(agent.manifests / "all.yaml", [manifests.node("node", node.v4), *objects])
    agent.start()
    wait_until("all is programmed", lambda: _backends(agent) == ENDPOINTS * len(WAYS))
    return client, agent


def _backends(agent: LabAgent) -> int:
    found = status.read(agent.paths)
    return found.backends if found else 0


def _objects(number: int, way: Way, pods: list[Host]) -> list[manifests.Manifest]:
    service = f"s{number}"
    made = [manifests.endpoint(pod.v4, node="node", target=pod.name) for pod in pods]
    slow = {WEIGHT_ANNOTATION: str(way.weight)} if way.weight != 100 else None
    chosen = {SCHEDULER_ANNOTATION: way.scheduler}
    ports = [{"port": TARGET}]
    return [
        manifests.service(service, [way.address], [{"port": PORT}], annotations=chosen),
        manifests.endpoint_slice(service, "IPv4", made[:-1], ports),
        manifests.endpoint_slice(
            service, "IPv4", made[-1:], ports, name=f"{service}-slow", annotations=slow
        ),
    ]


Took = dict[str, list[list[float]]]  # by the way's name: milliseconds, by round


def _measure(client: Host, wanted: argparse.Namespace) -> Took:
    took: Took = defaultdict(list)
    for turn in range(wanted.rounds):
        for way in WAYS:
            print_step(f"round {turn + 1} of {wanted.rounds}: {way.name}")
            words = ("load", way.address, PORT, RATE, wanted.seconds, turn)
            loading = client.python(PROGRAM, *map(str, words), stdout=PIPE)
            took[way.name].append(json.loads(loading.communicate()[0]))
    return took


def _rows(took: Took) -> Lines:
    yield (
        f"connect to answer: {ENDPOINTS - 1} endpoints that take {FAST} ms, one {SLOW} ms;"
        f" {RATE} connections a second"
    )
    for name, rounds in took.items():
        for share in (0.5, 0.99):
            each = [percentile(one, share) for one in rounds]
            whole = percentile([ms for one in rounds for ms in one], share)
            yield row_of(f"p{share * 100:.0f}, {name}", each, "ms", value=whole)


if __name__ == "__main__":
    main()
