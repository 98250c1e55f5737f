# SPDX-License-Identifier: Apache-2.0
"""Nodes of a lab with real agents that read a test's manifests; sockets and servers on any host."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from socket import AF_INET, SOCK_STREAM
from typing import Any, TypeVar

from ebpflb.entries.services import Frontend
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab import manifests, traffic
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.manifests import Manifest
from ebpflb.model.packet_path import Engine
from tests.kit import forked, lab_client
from tests.kit.forked import ForkedAgent
from tests.kit.sockets import Sockets
from tests.load import paused

PORT, TARGET, NODEPORT = 80, 8080, 30080
MARKER = "10.96.255.255"
TRAFFIC = Path(traffic.__file__)
CLIENT = Path(lab_client.__file__), str(TRAFFIC.parent)  # the program, and its first word
_numbers = count(1)


class LabCluster:
    """A cluster that has no node at first; subclasses add nodes, pods and agents.

    ``engine`` is the engine that opens flows, unless an agent's options choose another.
    """

    engine = Engine.FLOWS

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.agents: list[LabAgent] = []
        self.without_agent: list[Host] = []  # further nodes
        self.published = 0
        self._manifests = ""
        self._sockets: dict[str, Sockets] = {}
        self._maps: dict[LabAgent, dict[str, Map]] = {}

    def add_agent(self, node: Host, *options: str) -> LabAgent:
        """Return an agent on this node, not started yet; all agents have the same manifests."""
        agent = ForkedAgent(self.lab, node, self.folder, *options)
        agent.defaults = (f"--packet-path={self.engine}",)
        self.agents.append(agent)
        self._write_to(agent)
        return agent

    def start(self) -> None:
        self.publish()
        for agent in self.agents:
            agent.start()

    def publish(self, *said: Manifest | list[Manifest]) -> None:
        """Replace all manifests; return when every running agent has programmed them."""
        self.write(*said)
        for agent in self.agents:
            if agent.process and agent.process.poll() is None:
                wait_until("the manifests are in force", partial(self.in_force, agent))

    def write(self, *said: Manifest | list[Manifest]) -> None:
        """Replace all manifests like ``publish``, without waiting.

        By a marker Service ``in_force`` recognizes the end: the agent plans the marker last in its
        namespace, to which nearly all Services of tests belong.
        """
        self.published += 1
        marker = [{"name": "it", "port": self.published}]
        everything = [it for each in said for it in (each if isinstance(each, list) else [each])]
        if not any(it["kind"] == "Node" for it in everything):
            nodes = [*(agent.node for agent in self.agents), *self.without_agent]
            everything += [manifests.node(node.name, node.v4, node.v6) for node in nodes]
        everything.append(manifests.service("zzz", [MARKER], marker))
        self._manifests = manifests.text(everything)
        for agent in self.agents:
            self._write_to(agent)

    def _write_to(self, agent: LabAgent) -> None:
        manifests.replace(agent.manifests / "all.yaml", self._manifests)

    def in_force(self, agent: LabAgent | None = None) -> bool:
        """Whether the last published manifests are in the agent's maps."""
        maps = self.maps_of(agent or self.agents[0])
        marker = Frontend(ip_address(MARKER), self.published, 6)
        return maps["services"].get(marker) is not None and maps["settings"].get(0).writes % 2 == 0

    @property
    def maps(self) -> dict[str, Map]:
        """Return the maps of the first node."""
        return self.maps_of(self.agents[0])

    def maps_of(self, agent: LabAgent) -> dict[str, Map]:
        if agent not in self._maps:
            self._maps[agent] = StateDir(agent.paths.state).open_maps()
        return self._maps[agent]

    def verdict(self, name: str) -> int:
        """Return how often the first node's programs have counted this verdict."""
        number = next(number for number, word in VERDICTS.items() if word == name)
        return int(sum(self.maps["verdicts"].get(number)))

    def ebpflb(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command on the first node, with options for the agent's directories."""
        agent = self.agents[0]
        return forked.run(*words, *agent.where, netns=agent.node.netns)

    def metrics(self) -> list[str]:
        """Return the lines of the first agent's /metrics, as its own node reads them."""
        code, body = self.http_get(10249, "/metrics")
        assert code == 200, body
        return body.splitlines()

    def http_get(self, port: int, path: str) -> tuple[int, str]:
        """Return status and body of a server on the first node's loopback; 0 without a server."""
        with self.sockets(self.agents[0].node).open(AF_INET, SOCK_STREAM) as stream:
            try:
                stream.connect(("127.0.0.1", port))
            except ConnectionRefusedError:
                return 0, ""
            stream.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            said = b""
            while piece := stream.recv(1 << 16):
                said += piece
        head, _, body = said.decode().partition("\r\n\r\n")
        return int(head.split()[1]), body

    def logs(self, words: str) -> None:
        """Return when the first agent has logged these words."""
        wait_until(f"the log says {words}", lambda: words in self.agents[0].log())

    def restart(self, *options: str) -> None:
        """Restart the first node's agent with these options."""
        agent = self.agents[0]
        agent.stop()
        agent.options = options
        agent.start()

    def close_maps(self) -> None:
        """Close the maps. Call this after they have been pinned again."""
        for maps in self._maps.values():
            for opened in maps.values():
                opened.close()
        self._maps.clear()

    def sockets(self, host: Host) -> Sockets:
        """Return the sockets of a host, which are all in one process."""
        if host.name not in self._sockets:
            self._sockets[host.name] = Sockets(host)
            self.lab.keep(self._sockets[host.name].process)
        return self._sockets[host.name]

    def close_sockets(self) -> None:
        """End the processes that hold the sockets, which closes the sockets."""
        for sockets in self._sockets.values():
            sockets.close()
        self._sockets.clear()

    def start_program(self, host: Host, *words: str, **options: object) -> "subprocess.Popen[str]":
        """Start a command of ``ebpflb.lab.traffic``; return when it is ready."""
        process = host.python(TRAFFIC, *words, stdout=subprocess.PIPE, **options)
        return self.lab.keep_ready(process)

    def start_client(
        self, host: Host, protocol: str, address: str, port: int = PORT, pause: float = 0.0
    ) -> "subprocess.Popen[str]":
        """Start a client that sends requests until ``stop_client``; wait for one answer."""
        words = *CLIENT, "repeat", protocol, address, str(port), str(paused(pause))
        client = host.python(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self.lab.keep_ready(client)

    def stop_client(self, client: "subprocess.Popen[str]") -> Any:
        """End the client; return its counts."""
        said, _ = client.communicate("", timeout=60)
        return json.loads(said)

    def request(self, host: Host, protocol: str, address: str, port: int, times: int) -> Any:
        """Return the counts of a client that sends this many requests."""
        return json.loads(
            self._output_of(host, "request", protocol, address, str(port), str(times))
        )

    def echo(self, host: Host, address: str, port: int, size: int = 1 << 20) -> str:
        """Return the name of the backend that returned these bytes unchanged; "" if none did."""
        return "".join(self.echoes(host, address, port, 1, size))

    def echoes(
        self, host: Host, address: str, port: int, times: int, size: int = 1 << 20
    ) -> list[str]:
        """Call ``echo`` several times, until one fails."""
        words = (address, str(port), str(size), str(times))
        return self._output_of(host, "echo", *words).splitlines()

    def _output_of(self, host: Host, *words: str) -> str:
        process = self.lab.keep(host.python(*CLIENT, *words, stdout=subprocess.PIPE))
        return process.communicate()[0]

    def close(self) -> None:
        self.close_sockets()
        self.close_maps()
        for agent in self.agents:
            agent.close()


Made = TypeVar("Made", bound=LabCluster)


def new_lab() -> Lab:
    """Return a lab that disturbs no other lab of this process."""
    return Lab(f"ebpflb-test-{os.getpid()}-{next(_numbers)}")


@contextmanager
def started(make: Callable[[Lab], Made]) -> Iterator[Made]:
    """Yield a cluster in a lab with running agents; everything is removed afterwards."""
    with new_lab() as lab:
        made = make(lab)
        try:
            made.start()
            yield made
        finally:
            made.close()
