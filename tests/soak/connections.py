# SPDX-License-Identifier: Apache-2.0
"""Real traffic through a real agent, whose endpoints change and which is killed all the time."""

import json
import math
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ebpflb.lab import traffic
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.serve import status
from ebpflb.serve.conditions import not_ready
from tests.kit import requests
from tests.kit.cluster import NODEPORT, PORT, VIP, VIP6, Cluster, endpoint, web
from tests.kit.sockets import Socket
from tests.soak.client import STEP

CLIENT = Path(__file__).with_name("client.py")
LAB = str(Path(traffic.__file__).parent)
PAUSE = 0.005  # seconds between two requests of one client
OPEN = 8  # connections that stay open
REWRITES = 20  # of the endpoints, in a round
ENDINGS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, None)


class Counts:
    """The counts; ``lost`` are requests and open connections that failed."""

    def __init__(self) -> None:
        self.answers = self.restarts = self.kills = self.rewrites = self.kept = 0
        self.lost: Counter[str] = Counter()
        self.steps: Counter[int] = Counter()

    def add(self, name: str, said: dict[str, Any]) -> None:
        """Add the counts that a client reports."""
        self.answers += sum(said["answers"].values())
        self.lost.update({f"{name}: {word}": count for word, count in said["errors"].items()})
        self.steps.update({int(step): count for step, count in said["steps"].items()})

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        left = math.ceil(share * self.steps.total())
        for step, count in sorted(self.steps.items()):
            left -= count
            if left <= 0:
                return float(STEP**step / 1e3)
        return 0.0


class Traffic:
    """A node with clients on it and outside."""

    def __init__(self, lab: Lab, folder: Path, seed: int, counts: Counts) -> None:
        self.random, self.counts = random.Random(seed), counts
        self.cluster = Cluster(lab, folder, "--cluster-cidr=10.0.0.0/16,fd00:10::/64")
        self.outside = lab.outside("outside", 7)
        self.open: list[Socket] = []

    def round(self, is_over: Callable[[], bool]) -> None:
        """Clients begin; endpoints change, and the agent ends and begins; clients end."""
        node, pod = self.cluster.node.v4, self.cluster.client
        clients = [
            self._start(pod, "tcp", VIP, PORT),
            self._start(pod, "tcp", VIP6, PORT),
            self._start(pod, "udp", VIP, PORT),
            self._start(self.outside, "tcp", node, NODEPORT),
        ]
        try:
            self._churn(is_over)
        finally:
            for name, client in clients:
                said, _ = client.communicate("", timeout=60)
                self.counts.add(name, json.loads(said.splitlines()[-1]))
        self._check_open()

    def begin(self) -> None:
        self._rewrite()
        self.cluster.agent.start()
        self.cluster.publish(self._services())
        self._check_open()

    def _start(
        self, host: Host, protocol: str, address: str, port: int
    ) -> tuple[str, "subprocess.Popen[str]"]:
        """Start a client in its own session: Ctrl-C ends the soak, which ends its clients."""
        words = (LAB, protocol, address, str(port), str(PAUSE))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        started = host.python(CLIENT, *words, **pipes)
        return f"{protocol} to {address}:{port}", self.cluster.lab.keep_ready(started)

    def _churn(self, is_over: Callable[[], bool]) -> None:
        how, agent = self.random.choice(ENDINGS), self.cluster.agent
        end_at = self.random.randrange(REWRITES)
        for number in range(REWRITES):
            self._rewrite()
            time.sleep(self.random.choice((0.0, 0.02, 0.1)))
            if number == end_at and how is not None:
                agent.stop(how)
                self._rewrite()
                agent.start()
                self.counts.restarts += 1
                self.counts.kills += how is signal.SIGKILL
            if is_over():
                break
        wait_until("the agent is ready", self._is_ready, 60)

    def _is_ready(self) -> bool:
        last = status.read(self.cluster.agent.paths)
        return last is not None and not not_ready(last) and self.cluster.in_force()

    def _services(self) -> list[Any]:
        pods = self.cluster.web
        some = [self.random.sample(pods, self.random.randint(1, len(pods))) for _ in range(2)]
        v4, v6 = [endpoint(p) for p in some[0]], [endpoint(p, v6=True) for p in some[1]]
        return web(*v4, v6=v6, nodeport=NODEPORT)

    def _rewrite(self) -> None:
        """Other endpoints, never none."""
        self.cluster.write(self._services())
        self.counts.rewrites += 1

    def _check_open(self) -> None:
        """Connections that are open answer; one of them is closed, and new ones are opened."""
        alive = []
        for client in self.open:
            try:
                client.send(b"still there?")
                assert client.recv(64) == b"still there?"
                alive.append(client)
                self.counts.kept += 1
            except (OSError, AssertionError) as error:
                self.counts.lost[f"an open connection: {error}"] += 1
        if len(alive) == OPEN:
            alive.pop(0).close()
        pod = self.cluster.sockets(self.cluster.client)
        while len(alive) < OPEN:
            client = requests.tcp_socket(pod, VIP)
            client.connect((VIP, PORT))
            client.recv(64)
            alive.append(client)
        self.open = alive


@contextmanager
def running(seed: int, counts: Counts) -> Iterator[Traffic]:
    """A cluster whose agent runs; all of it is removed afterwards."""
    with (
        TemporaryDirectory(prefix="ebpflb-soak-") as folder,
        Lab(f"ebpflb-soak-{os.getpid()}") as lab,
    ):
        made = Traffic(lab, Path(folder), seed, counts)
        try:
            made.begin()
            yield made
        finally:
            with suppress(OSError):
                made.cluster.close_sockets()
            made.cluster.close()
