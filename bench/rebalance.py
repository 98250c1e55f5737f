# SPDX-License-Identifier: Apache-2.0
"""Connections that move to new endpoints: how they spread, and which requests of real clients fail.

    sudo .venv/bin/python -m bench.rebalance [--seconds S] [--clients NAME,...] [--python FILE]
        [--late SECONDS] [--plot 0]

A node with an agent, endpoints in its pods, and clients in another pod, each with 24 connections
that rest for up to 5 s between two POSTs; one response in ten takes up to 4 s. The Service's
endpoints change from 3 to 6 and back every 40 s; those that leave close their connections, each
with its next response. All of it without and with ``rebalance: idle=1s,above=20%``. Then 96
connections by endpoint are drawn over a scale-up, both ways, as docs/images/rebalance.svg.

``--python`` is the interpreter that runs the Python clients; clients that are not installed are
left out. ``--late``: each call of a client that sends begins so much later, by strace: then many
connections end after the client has looked at them, and before it sends.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

from bench import http_program, plot
from bench.report import Lines, Row
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.kernel.node import namespaces, sock_diag
from ebpflb.lab import cni, manifests
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Lab
from ebpflb.lab.netns import NETNS
from ebpflb.model.annotations import REBALANCE_ANNOTATION

PREFIX = "ebpflb-rebalance"
PROGRAM = Path(http_program.__file__)
LOAD = PROGRAM.with_name("load")
PICTURE = PROGRAM.parents[1] / "docs/images/rebalance.svg"
ADDRESS, HTTP, GRPC, TARGET = "10.96.0.10", 80, 81, 8080
FEW, MANY, EVERY = 3, 6, 40  # endpoints; seconds between two changes
BEFORE, AFTER = 15, 225  # seconds of the plot, from its scale-up
WAYS = {"without": None, "with": "idle=1s,above=20%"}
SENDING = "sendto,sendmsg,write,writev"  # system calls
CLIENTS = ("requests", "httpx", "aiohttp", "grpcio", "curl", "go", "java")


class Bench:
    """The node, its pods and its agent."""

    def __init__(
        self, lab: Lab, folder: Path, stack: ExitStack, python: str, late: float = 0.0
    ) -> None:
        self.lab, self.folder, self.python = lab, folder, python
        inject = f"inject={SENDING}:delay_enter={late:g}s"
        trace = "strace", "-f", "-qq", "--seccomp-bpf", "-o/dev/null", f"-etrace={SENDING}"
        self.under = [*trace, "-e", inject] if late else []
        self.node = lab.node("node", 1)
        self.client = lab.pod(self.node, "client", 2)
        self.pods = [lab.pod(self.node, f"pod-{i}", 11 + i) for i in range(MANY)]
        self.servers = [
            lab.keep_ready(pod.start([python, str(PROGRAM), "serve", str(TARGET)], stdout=PIPE))
            for pod in self.pods
        ]
        self.agent = LabAgent(lab, self.node, folder, "--cluster-cidr", ",".join(cni.NETWORKS))
        stack.callback(self.agent.close)
        self.way, self.count = "without", FEW
        self.publish()
        self.agent.start()

    def publish(self) -> None:
        """Write the Service with its first endpoints; the others end their connections."""
        ports = [
            {"name": name, "port": port, "protocol": "TCP", "appProtocol": name}
            for name, port in (("http", HTTP), ("grpc", GRPC))
        ]
        text = WAYS[self.way]
        annotated = {REBALANCE_ANNOTATION: text} if text else None
        targets = [
            {"name": "http", "port": TARGET, "protocol": "TCP"},
            {"name": "grpc", "port": TARGET + 1, "protocol": "TCP"},
        ]
        there = [
            manifests.endpoint(pod.v4, node=self.node.name, target=pod.name)
            for pod in self.pods[: self.count]
        ]
        for number, server in enumerate(self.servers):
            is_used = number < self.count
            server.send_signal(signal.SIGUSR2 if is_used else signal.SIGUSR1)
        objects = [
            manifests.service("web", [ADDRESS], ports, annotations=annotated),
            manifests.endpoint_slice("web", "IPv4", there, targets),
            manifests.node(self.node.name, self.node.v4),
        ]
        manifests.write(self.agent.manifests / "all.yaml", objects)

    def scale(self, count: int) -> None:
        self.count = count
        self.publish()

    def start(self, name: str, seconds: float) -> "list[subprocess.Popen[str]]":
        """Start a client of this name; none if it is missing."""
        url, its = f"http://{ADDRESS}:{HTTP}", str(seconds)
        if name in http_program.CLIENTS:
            if subprocess.run(
                [self.python, "-c", f"import {name.removesuffix('io')}"],
                capture_output=True,
                check=False,
            ).returncode:
                return []
            port = GRPC if name == "grpcio" else HTTP
            command = [self.python, str(PROGRAM), name, f"http://{ADDRESS}:{port}", its]
        elif not shutil.which(name):
            return []
        elif name == "curl":
            words = ["curl", "-s", "--rate", "24/m", "-m", "30", "-d", "x", "-o", "/dev/null"]
            said = ["-w", "%{http_code} %{errormsg}\n", f"{url}/[1-{int(seconds * 0.4)}]"]
            command = [*self.under, *words, *said]
            return [self.client.start(command, stdout=PIPE) for _ in range(http_program.WORKERS)]
        else:
            program = ["java", str(LOAD / "Client.java")]
            if name == "go":
                program = [str(self.folder / "client")]
                build = ["go", "build", "-o", *program, str(LOAD / "client.go")]
                subprocess.run(build, check=True)
            command = [*program, url, its, str(http_program.WORKERS)]
        return [self.client.start([*self.under, *command], stdout=PIPE)]

    def seen(self) -> set[str]:
        """Return the numbers of the requests that any server has had."""
        found = set[str]()
        for pod in self.pods:
            said = self.client.start(
                ["curl", "-s", f"http://{pod.v4}:{TARGET}/seen"], stdout=PIPE
            ).communicate()[0]
            found |= {*json.loads(said)}
        return found

    def held(self) -> Counter[str]:
        """Return how many connections each pod's server has."""
        found = Counter[str]()
        for pod in self.pods:
            with namespaces.call_in(NETNS / pod.netns, sock_diag.SockDiag) as diag:
                states = 1 << 1
                listed = diag.connected(6, states=states)
                found[pod.name] = sum(one.local[1] == TARGET for one in listed)
        return found


def main() -> None:
    run_bench(
        __doc__,
        _measured,
        seconds=300,
        clients=",".join(CLIENTS),
        python=sys.executable,
        late=0.0,
        plot=1,
    )


def _measured(wanted: argparse.Namespace) -> Lines:
    with temporary_lab(PREFIX) as (lab, folder, stack):
        bench = Bench(lab, folder, stack, wanted.python, wanted.late)
        for way in WAYS if wanted.seconds else ():
            bench.way = way
            bench.scale(FEW)
            yield f"requests that fail, {way} rebalance"
            yield from _failures(bench, wanted.clients.split(","), wanted.seconds)
        if wanted.plot:
            drawn = {f"{way} rebalance": _spread(bench, way) for way in WAYS}
            plot.draw_spread(drawn, PICTURE)
            yield f"connections by endpoint {AFTER} s after a scale-up from {FEW} to {MANY}"
            for name, seconds in drawn.items():
                yield Row(name, max(seconds[-1].values()), "", note=str(dict(seconds[-1])))


def _failures(bench: Bench, names: list[str], seconds: float) -> Lines:
    print_step(f"{bench.way} rebalance: {', '.join(names)}")
    clients = {name: its for name in names if (its := bench.start(name, seconds))}
    end, count = time.monotonic() + seconds, FEW
    moved = _moved(bench)
    while time.monotonic() < end:
        time.sleep(min(EVERY, max(0.0, end - time.monotonic())))
        count = MANY if count == FEW else FEW
        bench.scale(count)
    told = {name: [it.communicate()[0] for it in its] for name, its in clients.items()}
    seen = bench.seen()
    for name, said in told.items():
        count, failed, note = _read(name, said, seen)
        yield Row(f"{name}, of {count:,} requests", failed, "", note=note)
    yield Row("connections that moved", _moved(bench) - moved, "")


def _read(name: str, said: list[str], seen: set[str]) -> tuple[int, int, str]:
    """Return how many requests a client made, how many failed, and what it said."""
    if name == "curl":
        lines = [line for each in said for line in each.splitlines()]
        failed = [line for line in lines if not line.startswith("200")]
        return len(lines), len(failed), "; ".join(sorted({it[:60] for it in failed})[:2])
    found = json.loads(said[0])
    errors = Counter(error[:70] for error in found["failed"].values())
    reached = len(seen & found["failed"].keys())
    note = (
        f"{errors.most_common(1)[0][0]}; {reached} of them had reached a server" if errors else ""
    )
    return found["count"], len(found["failed"]), note


def _moved(bench: Bench) -> int:
    return sum(map(int, re.findall(r"(\d+) idle connections ended", bench.agent.log())))


def _spread(bench: Bench, way: str) -> list[Counter[str]]:
    """Return each endpoint's connections in each second."""
    print_step(f"connections by endpoint, {way} rebalance")
    bench.way = way
    bench.scale(FEW)
    clients = [bench.start("aiohttp", 3600)[0] for _ in range(4)]
    found = []
    wait_until("all are connected", lambda: bench.held().total() == 4 * http_program.WORKERS)
    for second in range(BEFORE + AFTER):
        if second == BEFORE:
            bench.scale(MANY)
        found.append(bench.held())
        time.sleep(1)
    for each in clients:
        each.kill()
        each.communicate()
    return found


if __name__ == "__main__":
    main()
