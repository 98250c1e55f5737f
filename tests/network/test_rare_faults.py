# SPDX-License-Identifier: Apache-2.0
"""Rare faults that no client notices.

The kernel kills the agent for its memory, the API server sends unusable data, the clock jumps. The
agent reads its objects from an API server. A client without an answer fails the test.
"""

import gzip
import json
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.entries.services import Frontend
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit import memory_limit, needs
from tests.kit.api_history import status
from tests.kit.api_server import FakeApiServer
from tests.kit.cluster import NODEPORT, PORT, VIP, VIP6, endpoint, web
from tests.kit.lab_cluster import TARGET, LabCluster, new_lab
from tests.load import scaled

CLOCK = Path(__file__).parents[1] / "kit" / "clock.c"
DAY = 86_400  # seconds
BOMB_SIZE = 1 << 30  # bytes, when it is expanded
MEMORY = 16 << 20  # bytes that the agent may take besides what it has
MOST_GROWTH = 100 << 10  # kB that the agent may grow for what it cannot use


class OfApi(LabCluster):
    """A node with three endpoints, and clients by socket, by packets, and from outside."""

    def __init__(self, lab: Lab, folder: Path, engine: Engine) -> None:
        super().__init__(lab, folder)
        self.engine = engine
        self.node = lab.node("node", 1)
        self.clients = [lab.pod(self.node, "hooked", 2), lab.pod(self.node, "not", 3, hooked=False)]
        self.web = [lab.pod(self.node, f"web-{i}", 10 + i) for i in range(1, 4)]
        self.outside = lab.outside("outside", 1)
        for pod in self.web:
            self.start_program(pod, "serve", pod.name, str(TARGET))
        with nodes.entered(self.node.netns):
            self.api = FakeApiServer()
        self.agent = self.add_agent(
            self.node, "--kubeconfig", str(self.api.kubeconfig(folder)), f"--packet-path={engine}"
        )

    def begin(self) -> None:
        self.api.put(manifests.node("node", self.node.v4, self.node.v6))
        self.api.put(manifests.service_cidr("10.96.0.0/16", "fd00:96::/112"))
        self.serve(*self.web)
        self.agent.start()

    def serve(self, *pods: Host) -> None:
        for each in self.objects(*pods):
            self.api.put(each)

    def objects(self, *pods: Host) -> list[Any]:
        v6 = [endpoint(pod, v6=True) for pod in pods]
        return web(*map(endpoint, pods), v6=v6, nodeport=NODEPORT)

    def endpoints(self) -> set[str]:
        """Return the endpoints of the IPv4 cluster IP in the maps."""
        service = self.maps["services"].get(Frontend(ip_address(VIP), PORT, 6))
        found = self.maps["slots"].get_range(service.cluster.base, service.cluster.size)
        return {str(each.address) for each in found}

    def until_served_by(self, *pods: Host) -> None:
        wanted = {pod.v4 for pod in pods}
        wait_until("the endpoints are in force", lambda: self.endpoints() == wanted)


@pytest.fixture(
    params=[pytest.param(Engine.FLOWS, marks=pytest.mark.extended), Engine.NETFILTER], ids=str
)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OfApi]:
    """Yield a node; at the end no request of its clients has failed."""
    if request.param is Engine.NETFILTER:
        needs.netfilter()
    with new_lab() as lab:
        made = OfApi(lab, tmp_path, request.param)
        try:
            with made.api:
                made.begin()
                hooked, packets = made.clients
                ways = [(hooked, "tcp", VIP, PORT), (hooked, "udp", VIP6, PORT)]
                ways += [(packets, "tcp", VIP, PORT), (packets, "tcp", VIP6, PORT)]
                ways += [(made.outside, "tcp", made.node.v4, NODEPORT)]
                pressing = [made.start_client(*way, pause=0.003) for way in ways]
                yield made
                counts = [made.stop_client(each) for each in pressing]
        finally:
            made.close()
    for count in counts:
        assert count["errors"] == {}
        assert sum(count["names"].values()) >= scaled(10)


@pytest.mark.extended
def test_killed_for_its_memory(cluster: OfApi) -> None:
    """The agent is started again, and changes made in between are in force."""
    agent = cluster.agent
    assert agent.process
    with memory_limit.memory_limit(cluster.node.netns) as limit:
        limit.set(MEMORY)
        limit.take(agent.process.pid)
        number = 0
        while agent.process.poll() is None:
            number += 1
            ports = [{"name": f"p{port}", "port": port} for port in range(1, 400)]
            address = f"10.96.{100 + number // 250}.{number % 250 + 1}"
            cluster.api.put(manifests.service(f"big-{number}", [address], ports))
        assert limit.kills
    assert agent.process.returncode == -signal.SIGKILL
    first, *others = cluster.web
    cluster.serve(*others)
    agent.start()
    cluster.until_served_by(*others)
    cluster.serve(first)
    cluster.until_served_by(first)


def peak_memory(pid: int) -> int:
    """Return the process's peak memory in kB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_answers_that_nobody_can_use(cluster: OfApi) -> None:
    """After a list that expands to a gigabyte, or garbage, the agent asks again."""
    assert cluster.agent.process
    before = peak_memory(cluster.agent.process.pid)
    bomb = gzip.compress(bytes(BOMB_SIZE), 1)
    kinds = ["Service", "EndpointSlice"]
    lists = [cluster.api.lists(kind) for kind in kinds]
    for kind in kinds:
        for expired in (b"", json.dumps(status(410, "too old")).encode()):
            if expired:  # watches end, and lists follow
                cluster.api.fail(kind, 410, expired)
            cluster.api.fail(kind, 200, bomb, encoding="gzip")
            cluster.api.fail(kind, 200, bytes(1 << 20))
    cluster.api.drop()
    cluster.serve(*cluster.web[1:])
    cluster.until_served_by(*cluster.web[1:])

    def asked() -> list[int]:
        return [cluster.api.lists(kind) - had for kind, had in zip(kinds, lists, strict=True)]

    wait_until("the third list is good", lambda: asked() == [3, 3])
    assert peak_memory(cluster.agent.process.pid) - before < MOST_GROWTH


class Clock:
    """The clock of processes that are started with ``under``."""

    def __init__(self, folder: Path) -> None:
        library, self._file = folder / "clock.so", folder / "shift"
        flags = ["-Wall", "-Werror", "-O2", "-shared", "-fPIC"]
        subprocess.run(["gcc", *flags, str(CLOCK), "-o", str(library)], check=True)
        self._file.write_bytes(bytes(8))
        self.under = ["env", f"LD_PRELOAD={library}", f"CLOCK_SHIFT={self._file}"]

    def shift(self, seconds: int) -> None:
        """Return the difference from the kernel's clock, in seconds."""
        with self._file.open("r+b") as opened:
            opened.write(struct.pack("=q", seconds))


def reasons(cluster: OfApi, clock: Clock) -> list[Any]:
    """Return why `status` does not say OK; its clock jumps too."""
    command = [*cluster.node.enter, *clock.under, sys.executable, "-P", "-m", "ebpflb", "status"]
    command += ["-o", "json", *cluster.agent.where]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return list(json.loads(said)["reasons"])


@pytest.mark.extended
def test_a_clock_that_jumps(cluster: OfApi, tmp_path: Path) -> None:
    """After a jump of a day ahead and two back, changes are applied and the node is ready."""
    clock = Clock(tmp_path)
    cluster.agent.stop()
    cluster.agent.under = clock.under
    cluster.agent.start()
    for turn, seconds in enumerate((0, DAY, -DAY, 0)):
        clock.shift(seconds)
        chosen = cluster.web[turn % 2 : turn % 2 + 2]
        cluster.serve(*chosen)
        cluster.until_served_by(*chosen)
        wait_until("it is ready", lambda: not reasons(cluster, clock), seconds=60)
