# SPDX-License-Identifier: Apache-2.0
"""Real traffic through a real agent, whose endpoints change and which is killed again and again."""

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
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from bench import history
from bench.history import Applied, Endpoints, Fault, Open, Record, Request
from ebpflb.entries.services import Frontend
from ebpflb.lab import manifests, traffic
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.packet_path import Engine
from ebpflb.serve import status
from ebpflb.serve.conditions import not_ready
from tests.kit import requests
from tests.kit.cluster import NODEPORT, PORT, VIP, VIP6, Cluster, endpoint, web
from tests.kit.lab_cluster import TARGET
from tests.kit.sockets import Socket

CLIENT = Path(__file__).with_name("client.py")
LAB = str(Path(traffic.__file__).parent)
PAUSE = 0.005  # seconds between two requests of one client
OPEN = 8  # connections that stay open
REWRITES = 20  # of the endpoints, in a round
KEPT = "10.96.0.20"  # of a Service with session affinity
REMOVED = "others remove a map entry"
EMPTIED = "others empty the map of session affinity"
FAULTS = ("SIGKILL", "SIGKILL", "SIGTERM", REMOVED, "")
SYNC = 1  # seconds: map entries are compared every four of them
PUT_BACK = 150.0  # seconds: the audit rests longer after a comparison on a busy machine
SMALL = "--map-size=frontends=1024,backends=1024,slots=4096,tables=4096"  # compared sooner
STEP = 1.05  # percentiles are exact to this factor
WEB, WEB6, STICKY = "web, IPv4", "web, IPv6", "kept"


class Counts:
    """The counts; ``lost`` has the broken promises."""

    def __init__(self) -> None:
        self.answers = self.restarts = self.kills = self.rewrites = self.kept = 0
        self.lost: Counter[str] = Counter()
        self.steps: Counter[int] = Counter()

    def add(self, records: list[Record], broken: list[history.Violation]) -> None:
        for it in records:
            if isinstance(it, Request):
                self.answers += not it.error
                self.steps[step_of(it.ended - it.begun)] += 1
            self.kept += isinstance(it, Open) and not it.error
        self.lost.update(f"{it.client}: {it.kind}" for it in broken)

    def percentile(self, share: float) -> float:
        """Return the percentile in milliseconds."""
        left = math.ceil(share * self.steps.total())
        for step, count in sorted(self.steps.items()):
            left -= count
            if left <= 0:
                return float(STEP**step / 1e3)
        return 0.0


def step_of(seconds: float) -> int:
    return round(math.log(seconds * 1e6, STEP))


class Traffic:
    """A node with clients on it and outside. ``file`` gets the history.

    If it is ``unprotected`` the agent restores nothing, and more is removed.
    """

    def __init__(
        self, lab: Lab, folder: Path, seed: int, counts: Counts, file: Path, *, unprotected: bool
    ) -> None:
        self.random, self.counts = random.Random(seed), counts
        self.folder, self.file, self.unprotected = folder, file, unprotected
        options = ["--cluster-cidr=10.0.0.0/16,fd00:10::/64", f"--iptables-sync-period={SYNC}s"]
        options += [SMALL] + ["--audit=report"] * unprotected
        engine = list(Engine)[seed % len(Engine)]
        self.cluster = Cluster(lab, folder, *options, engine=engine)
        self.kept = [lab.pod(self.cluster.node, f"kept-{i}", 20 + i) for i in range(1, 4)]
        for pod in self.kept:
            self.cluster.start_program(pod, "serve", pod.name, str(TARGET))
        self.sticky = self.kept
        self.outside = lab.outside("outside", 7)
        self.open: list[Socket] = []
        self.records: list[Record] = []
        self.before: dict[object, Record] = {}  # what the next round has to know of the former ones

    def round(self, is_over: Callable[[], bool]) -> None:
        """Start clients, change endpoints, cause a fault, and end the clients."""
        node, pod = self.cluster.node.v4, self.cluster.client
        clients = [
            self._start(pod, "tcp", VIP, PORT, WEB),
            self._start(pod, "tcp", VIP6, PORT, WEB6),
            self._start(pod, "udp", VIP, PORT, WEB),
            self._start(pod, "tcp", KEPT, PORT, STICKY, sticky=True),
            self._start(self.outside, "tcp", node, NODEPORT, WEB),
        ]
        try:
            self._churn(is_over)
        finally:
            for client, file in clients:
                client.communicate("", timeout=60)
                self.records += history.read(file)
        self._check_open()
        self.end_round()

    def end_round(self) -> None:
        """Compare the results with the promises, and record them."""
        history.write(self.file, self.records)
        self.counts.add(self.records, history.check([*self.before.values(), *self.records]))
        for it in self.records:
            match it:
                case Endpoints():
                    self.before[it.service] = it
                case Applied():
                    self.before[Applied] = it
                case Request(sticky=True):
                    self.before[it.client] = it
        self.records = []

    def begin(self) -> None:
        at = time.monotonic()
        self._rewrite()
        self.cluster.agent.start()
        wait_until("the agent is ready", self._is_ready, 60)
        self.records.append(Fault(at, time.monotonic(), "the agent starts for the first time"))
        self._check_open()

    def _start(
        self, host: Host, protocol: str, address: str, port: int, service: str, *,
        sticky: bool = False,
    ) -> tuple[subprocess.Popen[str], Path]:  # fmt: skip
        """Start a client in its own session: Ctrl-C ends the soak, which ends its clients."""
        shown = f"[{address}]" if ":" in address else address
        name = f"{protocol} to {shown}:{port}"
        about = {"type": "request", "client": name, "service": service, "sticky": sticky}
        file = self.folder / f"{protocol}-{address}"
        words = (LAB, protocol, address, str(port), str(PAUSE), str(file), json.dumps(about))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        started = host.python(CLIENT, *words, **pipes)
        return self.cluster.lab.keep_ready(started), file

    def _churn(self, is_over: Callable[[], bool]) -> None:
        fault, fault_at = self.random.choice(FAULTS), self.random.randrange(REWRITES)
        for number in range(REWRITES):
            self._rewrite()
            time.sleep(self.random.choice((0.0, 0.02, 0.1)))
            self._see()
            if number == fault_at and fault:
                self._fail(fault)
            if is_over():
                break
        wait_until("the agent is ready", self._is_ready, 60)

    def _fail(self, fault: str) -> None:
        if fault == REMOVED:
            for _ in range(3 * self.unprotected):
                self._forget_clients()
                time.sleep(0.5)
            self._remove_entry()
        else:
            self._end_agent(signal.Signals[fault])

    def _end_agent(self, how: signal.Signals) -> None:
        at, agent = time.monotonic(), self.cluster.agent
        agent.stop(how)
        self._rewrite()
        agent.start()
        self.records.append(Fault(at, time.monotonic(), f"the agent ends by {how.name}"))
        self.counts.restarts += 1
        self.counts.kills += how is signal.SIGKILL

    def _remove_entry(self) -> None:
        """Remove the entry of the Service with affinity; return when the audit has restored it."""
        services, frontend = self.cluster.maps["services"], Frontend(ip_address(KEPT), PORT, 6)
        at, most = time.monotonic(), 4 * SYNC if self.unprotected else PUT_BACK
        services.delete([frontend])
        while services.get(frontend) is None and time.monotonic() < at + most:
            time.sleep(0.05)
            self._see()
        self.records.append(Fault(at, time.monotonic(), f"{REMOVED} of {STICKY}", STICKY))

    def _forget_clients(self) -> None:
        """Delete the entries that programs write: they are not audited, so nothing is restored."""
        clients, at = self.cluster.maps["affinity"], time.monotonic()
        clients.delete([key for key, _ in clients.items()])
        self.records.append(Fault(at, time.monotonic(), EMPTIED))

    def _is_ready(self) -> bool:
        last = status.read(self.cluster.agent.paths)
        is_ready = last is not None and not not_ready(last)
        return (is_ready or self.unprotected) and self._see()

    def _see(self) -> bool:
        """Note whether the agent has applied the last change."""
        if is_seen := self.cluster.in_force():
            self.records.append(Applied(time.monotonic(), self.cluster.published))
        return is_seen

    def _rewrite(self) -> None:
        """Write other endpoints, at least one."""
        v4, v6 = (self._some(self.cluster.web) for _ in range(2))
        if self.random.random() < 0.1:
            self.sticky = self._some(self.kept)
        now, version = time.monotonic(), self.cluster.published + 1
        for service, pods in {WEB: v4, WEB6: v6, STICKY: self.sticky}.items():
            names = frozenset(pod.name for pod in pods)
            self.records.append(Endpoints(now, service, version, names))
        said = web(*map(endpoint, v4), v6=[endpoint(p, v6=True) for p in v6], nodeport=NODEPORT)
        self.cluster.write(said + _sticky(self.sticky))
        self.counts.rewrites += 1

    def _some(self, pods: list[Host]) -> list[Host]:
        return self.random.sample(pods, self.random.randint(1, len(pods)))

    def _check_open(self) -> None:
        """Check that open connections answer; close one, and open new ones."""
        alive = []
        for client in self.open:
            used = Open(time.monotonic(), 0.0, "open connections")
            try:
                client.send(b"still there?")
                assert client.recv(64) == b"still there?"
                alive.append(client)
            except (OSError, AssertionError) as error:
                used = msgspec.structs.replace(used, error=str(error) or "a wrong answer")
            self.records.append(msgspec.structs.replace(used, ended=time.monotonic()))
        if len(alive) == OPEN:
            alive.pop(0).close()
        pod = self.cluster.sockets(self.cluster.client)
        while len(alive) < OPEN:
            client = requests.tcp_socket(pod, VIP)
            client.connect((VIP, PORT))
            client.recv(64)
            alive.append(client)
        self.open = alive


def _sticky(pods: list[Host]) -> list[Any]:
    ports = [{"name": "tcp", "port": TARGET, "protocol": "TCP"}]
    served = [{**ports[0], "port": PORT}]
    return [
        manifests.service(STICKY, [KEPT], served, sessionAffinity="ClientIP"),
        manifests.endpoint_slice(STICKY, "IPv4", [*map(endpoint, pods)], ports),
    ]


@contextmanager
def running(
    seed: int, counts: Counts, file: Path | None = None, *, unprotected: bool = False
) -> Iterator[Traffic]:
    """Yield a cluster whose agent runs; everything is removed afterwards."""
    with (
        TemporaryDirectory(prefix="ebpflb-soak-") as name,
        Lab(f"ebpflb-soak-{os.getpid()}") as lab,
    ):
        folder = Path(name)
        kept = file or folder / "history"
        made = Traffic(lab, folder, seed, counts, kept, unprotected=unprotected)
        try:
            made.begin()
            yield made
        finally:
            with suppress(OSError):
                made.cluster.close_sockets()
            made.cluster.close()
