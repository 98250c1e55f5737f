# SPDX-License-Identifier: Apache-2.0
"""For how long a pod's connected UDP socket keeps a removed endpoint, beside many pods.

    sudo .venv/bin/python -m bench.ended_sockets [--pods N] [--rounds K]

A client in one of N pods connects a UDP socket to a cluster IP, whose only endpoint is replaced.
Each pod has a process with a connected UDP socket of another Service, whose endpoint stays. The
time is from the new EndpointSlice to the error that the client's socket gets. The next round begins
at once, so changes come faster than the agent's second search.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from bench import targets
from bench.connect_lab import Client
from bench.report import Lines, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.lab import manifests
from ebpflb.lab.agents import LabAgent
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.manifests import Manifest

PREFIX = "ebpflb-ended"
PORT, TARGET = 53, 5353
MOVED, STAYING = "10.96.0.10", "10.96.0.11"
ENDPOINTS = ("10.244.9.1", "10.244.9.2", "10.244.9.3")  # nothing is sent to them
MS = 1e6


def main() -> None:
    run_bench(__doc__, _measured, pods=110, rounds=100)


def _measured(wanted: argparse.Namespace) -> Lines:
    yield "from the new slice to the error of a connected UDP socket"
    for size in sorted({1, wanted.pods}):
        print_step(f"{size} pods")
        with temporary_lab(PREFIX) as (lab, folder, stack):
            took = [each / MS for each in EndedLab(lab, folder, stack, size).rounds(wanted.rounds)]
        p99 = statistics.quantiles(took, n=100)[98]
        note = f"p99 {p99:.0f} ms, at most {max(took):.0f} ms"
        yield row_of(
            "connected socket", took, "ms", targets.ENDED_SOCKET, note, at=size, axis="pods"
        )


class EndedLab:
    """A node with many pods; ``turns`` are the addresses of the endpoint that is replaced."""

    def __init__(self, lab: Lab, folder: Path, stack: ExitStack, pods: int) -> None:
        self.node = lab.node("node", 1)
        self.turns = list(ENDPOINTS[:2])
        self.agent = LabAgent(lab, self.node, folder)
        stack.callback(self.agent.close)
        self._write()
        self.agent.start()
        hosts = [lab.pod(self.node, f"pod-{i}", 10 + i) for i in range(pods)]
        self.clients = [self._client(lab, host) for host in hosts]

    def _client(self, lab: Lab, host: Host) -> Client:
        """Return a client in a pod whose other process has a socket that stays."""
        Client(lab, host).begin("await_end", (STAYING, PORT))
        return Client(lab, host)

    def _write(self) -> None:
        services = _service("moved", MOVED, self.turns[0]) + _service(
            "staying", STAYING, ENDPOINTS[2]
        )
        node = manifests.node(self.node.name, self.node.v4, self.node.v6)
        manifests.replace(self.agent.manifests / "all.yaml", manifests.text([node, *services]))

    def rounds(self, count: int) -> list[int]:
        """Return the nanoseconds of each round; each uses a client in another pod."""
        return [self._round(self.clients[turn * 7 % len(self.clients)]) for turn in range(count)]

    def _round(self, client: Client) -> int:
        client.begin("await_end", (MOVED, PORT))
        client.answer()
        self.turns.reverse()
        begun = time.monotonic_ns()
        self._write()
        ended: int = client.answer()
        return ended - begun


def _service(name: str, ip: str, endpoint: str) -> list[Manifest]:
    port = {"name": "udp", "protocol": "UDP", "port": TARGET}
    return [
        manifests.service(name, [ip], [{**port, "port": PORT}]),
        manifests.endpoint_slice(
            name, "IPv4", [manifests.endpoint(endpoint, node="elsewhere", target=name)], [port]
        ),
    ]


if __name__ == "__main__":
    main()
