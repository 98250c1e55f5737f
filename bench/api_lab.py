# SPDX-License-Identifier: Apache-2.0
"""A node with an agent beside a fake API server of its own: ``api_program``."""

import json
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

from bench import api_program
from bench.agent import MS
from bench.connect_lab import PROGRAM, Client, Commanded, MeasuredAgent
from bench.pod_program import PAUSE
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab

IDLE = 2.0  # seconds
QUIET = 0.02  # processor seconds a second: the audit and the history do not read the maps
QUIET_TIMEOUT = 1200.0  # seconds; with a million endpoints 300 were too few

Sizes = list[list[int]]  # services, and endpoints of each


def serve_pods(lab: Lab, node: Host) -> list[Host]:
    """Serve two of the measured Service's endpoints, in turns."""
    pods = [lab.pod(node, f"web-{i}", 10 + i, hooked=False) for i in (1, 2)]
    for pod in pods:
        words = "serve", pod.name, str(api_program.TARGET)
        lab.keep_ready(pod.python(PROGRAM, *words, stdout=PIPE))
    return pods


class NodeApi:
    """A fake API server on a node; ``pods`` are the measured Service's endpoints, in turns."""

    def __init__(self, lab: Lab, node: Host, folder: Path, pods: list[Host], sizes: Sizes) -> None:
        self.pods = pods
        words = node.name, pods[0].v4, json.dumps(sizes)
        program = Path(api_program.__file__)
        self.api = Commanded(lab.keep(node.python(program, *words, stdin=PIPE, stdout=PIPE)))
        self.kubeconfig = folder / f"{node.name}.kubeconfig"

    def listen(self) -> None:
        """Returns when the API server answers."""
        self.url = f"http://127.0.0.1:{self.api.answer()}"
        config = {
            "clusters": [{"name": "it", "cluster": {"server": self.url}}],
            "users": [{"name": "it", "user": {"token": "none"}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "current-context": "it",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def move(self, client: Client, pod: int, *after: int, pause: float = PAUSE) -> float:
        """Return the milliseconds until a client reaches the measured Service's new endpoint.

        It connects again every ``pause`` seconds.
        """
        name = self.pods[pod].name
        client.begin("wait_for", (api_program.ADDRESS, api_program.PORT), name, pause)
        client.answer()  # the first answer, of whichever endpoint
        begun = self.api.do("move", self.pods[pod].v4, *after)
        return float(client.answer() - begun) / MS


class ApiNode(NodeApi):
    """The agent is not started yet; ``stack`` closes it."""

    def __init__(
        self, lab: Lab, node: Host, folder: Path, stack: ExitStack, pods: list[Host], sizes: Sizes
    ) -> None:
        super().__init__(lab, node, folder, pods, sizes)
        self.agent = MeasuredAgent(lab, node, folder, pods, "--iptables-sync-period=1h")
        stack.callback(self.agent.agent.close)

    def listen(self) -> None:
        """Returns when the API server answers; no kubeconfig has the agent ask it, as in a pod."""
        super().listen()
        self.agent.agent.options = (*self.agent.agent.options, "--master", self.url)

    def idle(self) -> float:
        """Return processor seconds per second."""
        begun, cpu = time.monotonic(), self.agent.cpu_seconds()
        time.sleep(IDLE)
        return (self.agent.cpu_seconds() - cpu) / (time.monotonic() - begun)

    def wait_for_quiet(self) -> None:
        """Wait until the first audit has ended; the next one is an hour later."""
        wait_until("the first audit has ended", lambda: self.idle() < QUIET, QUIET_TIMEOUT)
