# SPDX-License-Identifier: Apache-2.0
"""Nodes of a lab with the real agents, on what a test publishes; sockets and servers on any host.

``publish`` replaces all that the cluster says and returns when every agent has it in force.
"""

import json
import os
import subprocess
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.lab import manifests, traffic
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Sockets
from ebpflb.plan.entries import Frontend

PORT, TARGET, NODEPORT = 80, 8080, 30080
MARKER = "10.96.255.255"
TRAFFIC = Path(traffic.__file__)
PREFIX = f"ebpflb-test-{os.getpid()}"


class Ground:
    """Without a node at first."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.agents: list[LabAgent] = []
        self.published = 0
        self._said = ""
        self._sockets: dict[str, Sockets] = {}
        self._maps: dict[LabAgent, dict[str, Map]] = {}

    def employ(self, node: Host, *options: str) -> LabAgent:
        """An agent on this node, not started yet, to whom is said what is said to all."""
        agent = LabAgent(self.lab, node, self.folder, *options)
        self.agents.append(agent)
        self._say(agent)
        return agent

    def start(self) -> None:
        self.publish()
        for agent in self.agents:
            agent.start()

    def publish(self, *said: Manifest | list[Manifest]) -> None:
        """These objects and no others; returns when they are in force, where an agent is there."""
        self.announce(*said)
        for agent in self.agents:
            if agent.process and agent.process.poll() is None:
                wait_until("the manifests are in force", lambda it=agent: self.in_force(it))

    def announce(self, *said: Manifest | list[Manifest]) -> None:
        """The same without waiting; a marker will tell when they are in force."""
        self.published += 1
        marker = [{"name": "it", "port": self.published}]
        everything = [it for each in said for it in (each if isinstance(each, list) else [each])]
        if not any(it["kind"] == "Node" for it in everything):
            nodes = [agent.node for agent in self.agents]
            everything += [manifests.node(node.name, node.v4, node.v6) for node in nodes]
        everything.append(manifests.service("zzz", [MARKER], marker))
        self._said = manifests.text(everything)
        for agent in self.agents:
            self._say(agent)

    def _say(self, agent: LabAgent) -> None:
        manifests.replace(agent.manifests / "all.yaml", self._said)

    def in_force(self, agent: LabAgent | None = None) -> bool:
        """Whether what was last published is in the agent's maps, all of it."""
        maps = self.maps_of(agent or self.agents[0])
        marker = Frontend(ip_address(MARKER), self.published, 6)
        return maps["services"].get(marker) is not None and maps["settings"].get(0).writes % 2 == 0

    @property
    def maps(self) -> dict[str, Map]:
        """Those of the first node."""
        return self.maps_of(self.agents[0])

    def maps_of(self, agent: LabAgent) -> dict[str, Map]:
        if agent not in self._maps:
            self._maps[agent] = StateDir(agent.paths.state).open_maps()
        return self._maps[agent]

    def forget_maps(self) -> None:
        """The pins are others now."""
        for maps in self._maps.values():
            for opened in maps.values():
                opened.close()
        self._maps.clear()

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

    def begin(self, host: Host, *words: str, **options: object) -> "subprocess.Popen[str]":
        """A program of the lab that has said that it is ready."""
        process = self.lab.keep(host.python(TRAFFIC, *words, stdout=subprocess.PIPE, **options))
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def press(
        self, host: Host, protocol: str, address: str, port: int = PORT, pause: float = 0.0
    ) -> "subprocess.Popen[str]":
        """A client that has asked once and asks again and again, until it is released."""
        words = ("press", protocol, address, str(port), str(pause))
        return self.begin(host, *words, stdin=subprocess.PIPE)

    def release(self, pressing: "subprocess.Popen[str]") -> Any:
        """What the client counted."""
        said, _ = pressing.communicate("", timeout=60)
        return json.loads(said)

    def ask(self, host: Host, protocol: str, address: str, port: int, times: int) -> Any:
        """What a client counted that asked so often."""
        return json.loads(self._said_by(host, "ask", protocol, address, str(port), str(times)))

    def bulk(self, host: Host, address: str, port: int, size: int = 1 << 20) -> str:
        """Who gave back, unchanged, what it was sent; nobody: ""."""
        return self._said_by(host, "bulk", address, str(port), str(size)).strip()

    def _said_by(self, host: Host, *words: str) -> str:
        process = self.lab.keep(host.python(TRAFFIC, *words, stdout=subprocess.PIPE))
        return process.communicate()[0]

    def close(self) -> None:
        self.close_sockets()
        self.forget_maps()
        for agent in self.agents:
            agent.close()
