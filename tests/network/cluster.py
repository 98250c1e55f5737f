# SPDX-License-Identifier: Apache-2.0
"""A node of the lab with pods, servers, sockets and the real agent, on what a test publishes.

Every pod serves TCP and UDP on TARGET with its name; ``publish`` replaces all that the cluster
says and returns when it is in force.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ebpflb.datapath.maps import Map
from ebpflb.datapath.state import State
from ebpflb.lab import objects, traffic
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.objects import Object
from ebpflb.lab.sockets import Sockets
from ebpflb.plan.entries import Frontend

VIP, VIP6 = "10.96.0.10", "fd00:96::10"
EXTERNAL, BALANCER = "203.0.113.10", "203.0.113.20"
PORT, TARGET, NODEPORT = 80, 8080, 30080
MARKER = "10.96.255.255"
TRAFFIC = Path(traffic.__file__)
PREFIX = f"ebpflb-test-{os.getpid()}"

signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that whoever is ended cleans up


class Cluster:
    """``node`` with the pods ``client`` and ``web-1`` to ``web-3``."""

    def __init__(self, lab: Lab, folder: Path, *options: str) -> None:
        self.lab, self.folder = lab, folder
        self.node = lab.node("node", 1)
        self.client = lab.pod(self.node, "client", 2)
        self.web = [lab.pod(self.node, f"web-{i}", 10 + i) for i in range(1, 4)]
        self.agent = LabAgent(lab, self.node, folder, *options)
        self.agents = [self.agent]
        self.published = 0
        self._sockets: dict[str, Sockets] = {}
        self._maps: dict[str, Map] | None = None
        for pod in self.web:
            self.begin(pod, "serve", pod.name, str(TARGET))

    def start(self) -> None:
        self.publish()
        self.agent.start()

    def publish(self, *said: Object | list[Object]) -> None:
        """These objects and no others; returns when they are in force, if an agent is there."""
        self.announce(*said)
        if self.agent.process and self.agent.process.poll() is None:
            wait_until("the manifests are in force", self.in_force)

    def announce(self, *said: Object | list[Object]) -> None:
        """The same without waiting; a marker will tell when they are in force."""
        self.published += 1
        marker = [{"name": "it", "port": self.published}]
        everything = [it for each in said for it in (each if isinstance(each, list) else [each])]
        if not any(it["kind"] == "Node" for it in everything):
            everything.append(objects.node(self.node.name, self.node.v4, self.node.v6))
        everything.append(objects.service("zzz", [MARKER], marker))
        objects.write(self.agent.manifests / "all.yaml", everything)

    def copy_manifests(self, agent: LabAgent) -> None:
        """What is published here is said to another node's agent too."""
        said = (self.agent.manifests / "all.yaml").read_text()
        (agent.manifests / "all.yaml").write_text(said)

    def in_force(self) -> bool:
        """Whether what was last published is in the maps, all of it."""
        marker = Frontend(ip_address(MARKER), self.published, 6)
        written = self.maps["services"].get(marker) is not None
        return written and self.maps["settings"].get(0).writes % 2 == 0

    @property
    def maps(self) -> dict[str, Map]:
        if self._maps is None:
            self._maps = State(self.agent.places.state).open_maps()
        return self._maps

    def forget_maps(self) -> None:
        """The pins are others now."""
        for opened in (self._maps or {}).values():
            opened.close()
        self._maps = None

    def sockets(self, host: Host) -> Sockets:
        """The sockets of a host, all in one process."""
        if host.name not in self._sockets:
            self._sockets[host.name] = Sockets(host)
            self.lab.keep(self._sockets[host.name].process)
        return self._sockets[host.name]

    def close_sockets(self) -> None:
        """Ends the processes that hold them, and so releases them all."""
        for sockets in self._sockets.values():
            sockets.close()
        self._sockets.clear()

    def begin(self, host: Host, *words: str) -> "subprocess.Popen[str]":
        """A program of the lab that has said that it is ready."""
        process = self.lab.keep(host.python(TRAFFIC, *words, stdout=subprocess.PIPE))
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def press(self, protocol: str, address: str) -> "subprocess.Popen[str]":
        """A client that asks without pause, until it is released."""
        words, pipe = ("press", protocol, address, str(PORT)), subprocess.PIPE
        return self.lab.keep(self.client.python(TRAFFIC, *words, stdin=pipe, stdout=pipe))

    def release(self, pressing: "subprocess.Popen[str]") -> Any:
        """What the client counted."""
        said, _ = pressing.communicate("", timeout=20)
        return json.loads(said)

    def close(self) -> None:
        self.close_sockets()
        self.forget_maps()
        for agent in self.agents:
            agent.close()


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Cluster]:
    """A cluster whose agent is at work; afterwards nothing of it is left."""
    with Lab(PREFIX) as lab:
        cluster = Cluster(lab, folder, *options)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


def at(
    pod: Host,
    *,
    v6: bool = False,
    node: str = "node",
    zones: Iterable[str] = (),
    **conditions: bool,
) -> Object:
    """The pod as an endpoint."""
    found = objects.endpoint(pod.v6 if v6 else pod.v4, node=node, target=pod.name, **conditions)
    hints = {"hints": {"forZones": [{"name": zone} for zone in zones]}} if zones else {}
    return found | hints


def web(
    *endpoints: Object, v6: Iterable[Object] = (), nodeport: int | None = None, **spec: Any
) -> list[Object]:
    """The Service default/web on PORT for TCP and UDP, with slices of both families."""
    named = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
    ports: list[Object] = [{**port, "port": PORT} for port in named]
    if nodeport:
        spec = {"type": "NodePort"} | spec
        ports = [{**port, "nodePort": nodeport} for port in ports]
    return [
        objects.service("web", [VIP, VIP6], ports, **spec),
        objects.endpoint_slice("web", "IPv4", list(endpoints), named),
        objects.endpoint_slice("web", "IPv6", list(v6), named),
    ]
