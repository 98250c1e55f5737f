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
import json
import random
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

from bench import agent, api_program, report
from bench.connect_lab import PROGRAM, Client, Commanded, MeasuredAgent
from bench.report import Lines, Row, percentile, spread
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab

PREFIX = "ebpflb-bench"
RATES = (1, 10, 100, 400, 1000)  # changes a second
TARGETS = {100: 0.5, 400: 0.3, 1000: 0.3}  # ms a change
BESIDE = (0, 100)  # other changes a second
MOVES = 100
IDLE = 2.0  # seconds
QUIET = 0.02  # processor seconds a second: the audit and the history do not read the maps
QUIET_TIMEOUT = 300.0  # seconds


def main() -> None:
    wanted = _arguments()
    with temporary_lab(PREFIX) as (lab, folder, stack):
        rows = list(_measure(LoadLab(lab, folder, stack, wanted), wanted))
    print(report.machine())
    print(report.table(rows))


class LoadLab:
    """A node with an agent, the API server, a client and two servers."""

    def __init__(
        self, lab: Lab, folder: Path, stack: ExitStack, wanted: argparse.Namespace
    ) -> None:
        node = lab.node("load", 1)
        self.client = Client(lab, lab.pod(node, "client", 2))
        self.backends = [lab.pod(node, f"web-{i}", 10 + i) for i in (1, 2)]
        for pod in self.backends:
            words = "serve", pod.name, str(api_program.TARGET)
            lab.keep_ready(pod.python(PROGRAM, *words, stdout=PIPE))
        self.api = _api_server(lab, node, self.backends[0].v4, wanted)
        self.agent = MeasuredAgent(
            lab, node, folder, self.backends, *_options(self.api, folder, wanted)
        )
        stack.callback(self.agent.agent.close)


def _api_server(lab: Lab, node: Host, first: str, wanted: argparse.Namespace) -> Commanded:
    count = wanted.services - 1
    words = node.name, first, str(count), str(wanted.endpoints // count)
    return Commanded(lab, node, Path(api_program.__file__), *words)


def _options(api: Commanded, folder: Path, wanted: argparse.Namespace) -> list[str]:
    path = folder / "kubeconfig"
    server = {"server": f"http://127.0.0.1:{api.answer()}"}
    config = {
        "clusters": [{"name": "it", "cluster": server}],
        "users": [{"name": "it", "user": {"token": "none"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "current-context": "it",
    }
    path.write_text(json.dumps(config))
    sizes = f"--map-size={wanted.map_size}"
    return ["--kubeconfig", str(path), "--iptables-sync-period=1h", sizes]


def _measure(lab: LoadLab, wanted: argparse.Namespace) -> Lines:
    many = f"{wanted.services:,} services / {wanted.endpoints:,} endpoints"
    print_step("starting")
    started = lab.agent.start()
    lab.client.move(lab.agent.cgroup)
    yield f"agent, {many}, from an API server"
    yield Row("cold start", started.seconds, "s", None, f"CPU {started.cpu:.2f} s")
    yield agent.memory(lab.agent, "memory after it", 160)
    wait_until("the first audit has ended", lambda: _idle(lab) < QUIET, QUIET_TIMEOUT)
    yield Row("idle, between two audits", 1e3 * _idle(lab), "ms CPU a second")
    for rate in RATES:
        yield _cost(lab, rate, wanted.seconds)
    yield agent.memory(lab.agent, "memory after the changes", 160)
    yield "a change sent -> first answer from the new endpoint"
    for rate in BESIDE:
        yield from _latency(lab, rate)


def _idle(lab: LoadLab) -> float:
    """Processor seconds a second."""
    begun, cpu = time.monotonic(), lab.agent.cpu_seconds()
    time.sleep(IDLE)
    return (lab.agent.cpu_seconds() - cpu) / (time.monotonic() - begun)


def _cost(lab: LoadLab, rate: int, seconds: float) -> Row:
    print_step(f"{rate} changes a second")
    count = round(max(rate * seconds, 20))
    begun, cpu = time.monotonic(), lab.agent.cpu_seconds()
    lab.api.do("change", count, rate)
    _settle(lab)
    took = time.monotonic() - begun
    each = (lab.agent.cpu_seconds() - cpu) / count
    note = f"{count} changes, {count / took:.0f} a second until the last one was in force"
    return Row(f"CPU a change, {rate} a second", 1e3 * each, "ms", TARGETS.get(rate), note)


def _settle(lab: LoadLab) -> None:
    """The measured Service's endpoint is replaced last, and a client waits for it."""
    _move(lab, 1)
    _move(lab, 0)


def _move(lab: LoadLab, backend: int) -> float:
    """Milliseconds until a client reaches the new endpoint."""
    pod = lab.backends[backend]
    lab.client.begin("wait_for", (api_program.ADDRESS, api_program.PORT), pod.name)
    lab.client.answer()  # the first answer, of whichever endpoint
    begun = lab.api.do("move", pod.v4)
    return (lab.client.answer() - begun) / agent.MS


def _latency(lab: LoadLab, rate: int) -> Lines:
    print_step(f"latency beside {rate} changes a second")
    if rate:
        lab.api.do("begin", 1000 * rate, rate)
    took = []
    for turn in range(1, MOVES + 1):
        time.sleep(agent.PAUSE * (1 + random.random()))
        took.append(_move(lab, turn % 2))
    note = f"{spread(took, 1)}; p99 {percentile(took, 0.99):.1f}, most {max(took):.1f}"
    yield Row(f"p50, {rate} others a second", percentile(took, 0.5), "ms", 10, note)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--services", type=int, default=10_000)
    parser.add_argument("--endpoints", type=int, default=100_000)
    parser.add_argument("--map-size", default="", help="the agent's option")
    parser.add_argument("--seconds", type=float, default=10.0, help="of changes, for each rate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
