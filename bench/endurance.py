# SPDX-License-Identifier: Apache-2.0
"""An agent's memory and the longest pauses of its loop, for as long as asked.

    sudo .venv/bin/python -m bench.endurance [--minutes M] [--services N] [--endpoints E] [--rate R]
    .venv/bin/python -m bench.endurance --minutes 0     draws what was recorded

An agent as in a pod, on engine netfilter, whose API server changes R EndpointSlices a second all
the time: in each one endpoint is replaced by another. Every five seconds the measured Service's
endpoint is replaced too, and a client waits until it reaches the new one. The results are
bench/results/endurance.jsonl, with a line for each ten seconds: the RSS, and the longest time in
which the loop took no message (see ``paced_agent``); and docs/images/endurance.svg.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from bench import paced_agent
from bench.api_lab import ApiNode, serve_pods
from bench.connect_lab import Client
from bench.page import RESULTS, ROOT
from bench.plot import draw_trends
from bench.report import machine
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.lab.hosts import Lab, Process, start

PREFIX = "ebpflb-endurance"
BETWEEN_MOVES = 5.0  # seconds
WARM = 120.0  # seconds
FILE, PICTURE = RESULTS / "endurance.jsonl", ROOT / "docs/images/endurance.svg"
RSS, PAUSE = "the agent's RSS (MB)", "the loop's longest pause (s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, usual in {"minutes": 60.0, "services": 1000, "endpoints": 10, "rate": 10}.items():
        parser.add_argument(f"--{name}", type=type(usual), default=usual)
    wanted = parser.parse_args()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda *_: sys.exit(1))
    if wanted.minutes:
        with temporary_lab(PREFIX) as (lab, folder, stack):
            _run(lab, folder, stack, wanted)
    samples = read()
    draw_trends({RSS: (samples, "rss"), PAUSE: (samples, "pause")}, PICTURE)


def _run(lab: Lab, folder: Path, stack: ExitStack, wanted: argparse.Namespace) -> None:
    host = lab.node("node", 1)
    client = Client(lab, lab.pod(host, "client", 2))
    sizes = [[wanted.services, wanted.endpoints]]
    node = ApiNode(lab, host, folder, stack, serve_pods(lab, host), sizes)
    agent, samples = node.agent.agent, folder / "samples"

    def spawn(words: Sequence[str], log: IO[str]) -> Process:
        command = [sys.executable, "-P", paced_agent.__file__, str(samples), *words]
        return start(host.netns, lab.cgroup, command, stdout=log, stderr=log)

    agent.spawn = spawn  # type: ignore[method-assign]
    node.listen()
    agent.options = tuple(each for each in agent.options if "sync-period" not in each)
    print_step("starting")
    agent.start()
    client.move(node.agent.cgroup)
    begun, seconds = time.monotonic(), 60 * wanted.minutes
    node.api.do("begin", round(wanted.rate * seconds), wanted.rate)
    print_step("changing endpoints")
    turn = 0
    while time.monotonic() - begun < seconds:
        turn += 1
        node.move(client, turn % 2)
        time.sleep(BETWEEN_MOVES)
    words = f"{wanted.services} {wanted.endpoints} {wanted.rate}"
    about = {"machine": machine(), "moves": turn, "services, endpoints of each, rate": words}
    FILE.write_text(json.dumps(about) + "\n" + samples.read_text())


def read() -> list[dict[str, float]]:
    """Return the samples after the first minutes, in which the agent starts."""
    samples = [json.loads(line) for line in FILE.read_text().splitlines()[1:]]
    return [sample for sample in samples if sample["at"] > WARM]


if __name__ == "__main__":
    main()
