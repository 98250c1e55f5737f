# SPDX-License-Identifier: Apache-2.0
"""The steps of `ebpflb demo`: real connections through real programs, without Kubernetes.

Three nodes, two with pods, a client outside, and agents that read manifests, which each step
writes: connections to a ClusterIP over TCP and UDP, IPv4 and IPv6; a service scaled from three
endpoints to four; what `services get` and `explain` say; connections from outside to a NodePort
with both traffic policies; a load balancer address at which endpoints see their clients, and whose
node is cut off; and connections after the agent was killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ebpflb.entries.services import Frontend
from ebpflb.errors import NodeError
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab import cni, manifests, traffic
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.router import NODES as SEGMENT
from ebpflb.model.annotations import FORWARDING_ANNOTATION, KEEP_CLIENT
from ebpflb.model.pools import CLASS
from ebpflb.options import Paths
from ebpflb.serve import status

WEB = "web"
V4, V6 = "10.96.0.10", "fd00:96::10"
SHOP = "10.96.0.20"
SERVICE_RANGES = ("10.96.0.0/16", "fd00:96::/112")
PORT, TARGET, NODEPORT, SHOP_NODEPORT = 80, 8080, 30080, 30090
TARGETS = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
CONNECTIONS_A_LINE = 100  # connections in each line of the output
TRAFFIC = Path(traffic.__file__)
WIDTH = 80  # columns
LOG_WORDS = ("programs", "packet path", "serving")  # of the lines of the log that are shown

NODES = "node", "other", "third"
BALANCED, VIP = "10.96.0.200", "192.0.2.211"  # for which the third node answers first
_OPTIONS = ("--cluster-cidr", ",".join(cni.NETWORKS), "--l2-pool", VIP, "--hand-over=auto")
_SMALL = ("--map-size", "flows=66560,affinity=16384")  # what takes most memory

Say = Callable[[str], None]


class Demo:
    """The lab of the demo, and its steps."""

    def __init__(self, lab: Lab, folder: Path, say: Say) -> None:
        self.lab, self.say = lab, say
        say("  network namespaces: three nodes, six pods, a router, a client outside")
        self.node = lab.node(NODES[0], 1, cni.Bridge(hairpin=True))
        self.client = lab.pod(self.node, "client", 2)
        self.pods = [lab.pod(self.node, f"web-{i}", 10 + i) for i in range(1, 5)]
        self.other, self.third = (lab.node(it, at) for at, it in enumerate(NODES[1:], 2))
        self.far = lab.pod(self.other, "far-1", 11)
        for one, next_one in ((self.node, self.other), (self.third, self.node)):
            lab.join(one, next_one)
        lab.join(self.third, self.other)
        self.outside = lab.outside("outside", 7)
        self.agent = LabAgent(lab, self.node, folder, *_OPTIONS)
        self.others = [
            LabAgent(lab, it, folder, *_OPTIONS, *_SMALL) for it in (self.other, self.third)
        ]

    def build(self) -> None:
        """Start servers in the pods, three of which are in the service, and then the agent."""
        self.say("  web servers in five pods")
        for pod in (*self.pods, self.far):
            self._start_program(pod, "serve", pod.name, str(TARGET))
        self.lab.keep(self.client.start(["sleep", "infinity"], stdout=subprocess.DEVNULL))
        self.scale(3)
        self.say("  `ebpflb run` on the node; of its log:")
        self.agent.start()
        lines = [it for it in self.agent.log().splitlines() if any(w in it for w in LOG_WORDS)]
        for line in lines[: len(LOG_WORDS)]:
            _time, _level, message = line.split(" ", 2)
            self.say(_shortened(f"    {message}"))

    def scale(self, count: int) -> None:
        """Write the manifest with the first ``count`` pods as endpoints."""
        slices = _slices(self.pods[:count])
        ports = [{**port, "port": PORT, "nodePort": NODEPORT} for port in TARGETS]
        service = manifests.service("web", [V4, V6], ports, type="NodePort")
        node = manifests.node("node", self.node.v4, self.node.v6)
        ranges = manifests.service_cidr(*SERVICE_RANGES)
        manifests.write(self.agent.manifests / "web.yaml", [node, ranges, service, *slices])

    def connect(self) -> None:
        """Connect with every protocol and family from a pod, and to a NodePort from the node."""
        for protocol in ("tcp", "udp"):
            for address in (V4, V6):
                self._request(self.client, protocol, address)
        self._request(self.node, "tcp", self.node.v4, NODEPORT)

    def grow(self) -> None:
        """Add the fourth endpoint while a client connects until the endpoint answers."""
        waiting = self._start_program(self.client, "await", self.pods[3].name, V4, str(PORT))
        began = time.monotonic()
        self.scale(4)
        waiting.wait()
        took = (time.monotonic() - began) * 1e3
        self.say(f"  manifest written -> first connection on web-4: {took:.0f} ms")
        self._request(self.client, "tcp", V4)
        self._request(self.client, "udp", V6)

    def publish(self, policy: str) -> None:
        """Write a NodePort service with an endpoint on this node and one on the other node."""
        ports = [{"port": PORT, "nodePort": SHOP_NODEPORT}]
        here = _endpoint(self.pods[0], self.pods[0].v4)
        there = manifests.endpoint(self.far.v4, node=self.other.name, target=self.far.name)
        shop = manifests.service(
            "shop", [SHOP], ports, type="NodePort", externalTrafficPolicy=policy
        )
        slices = manifests.endpoint_slice("shop", "IPv4", [here, there], [{"port": TARGET}])
        manifests.write(self.agent.manifests / "shop.yaml", [shop, slices])
        wait_until(f"policy {policy} is in force", lambda: self._in_force(policy))

    def enter(self) -> None:
        """Connect from outside with both policies; print which pods reply and which client they
        see.
        """
        for policy in ("Local", "Cluster"):
            self.publish(policy)
            self.say(f"  externalTrafficPolicy: {policy}")
            self._say_clients(self._request(self.outside, "tcp", self.node.v4, SHOP_NODEPORT))

    def _say_clients(self, answer: Any) -> None:
        for name, sources in sorted(answer["sources"].items()):
            self.say(f"    {name} saw {' '.join(sources)}")

    def announce(self) -> None:
        """Give a Service a load balancer address, where endpoints see their clients, and pull the
        cable of the node that answers.
        """
        service = manifests.service(
            "balanced",
            [BALANCED],
            [{"port": PORT}],
            ingress=[VIP],
            type="LoadBalancer",
            loadBalancerClass=CLASS,
            annotations={FORWARDING_ANNOTATION: KEEP_CLIENT},
        )
        here = _endpoint(self.pods[0], self.pods[0].v4)
        there = manifests.endpoint(self.far.v4, node=self.other.name, target=self.far.name)
        slices = manifests.endpoint_slice("balanced", "IPv4", [here, there], [{"port": TARGET}])
        first, *nodes = (
            manifests.node(it.name, it.v4, it.v6) for it in (self.node, self.other, self.third)
        )
        for agent in (self.agent, *self.others):
            own = [] if agent is self.agent else [first]  # which it has already
            manifests.write(agent.manifests / "balanced.yaml", [*own, *nodes, service, slices])
        self.say("  `ebpflb run` on the two other nodes, too")
        other, third = self.others
        for agent in self.others:
            agent.start()
        self._say_owner(third)
        wait_until("nodes are tested", lambda: "to 2 of 2" in self._status(third).hand_over)
        wait_until("requests are handed over", self._is_handed_over)
        self._say_clients(self._request(self.outside, "tcp", VIP))
        waiting = self._start_program(self.outside, "gap", VIP, str(PORT))
        self.lab.router.ip(f"link set {SEGMENT.name}{len(NODES)} down")
        seconds, _ = waiting.communicate()
        self.say(f"  its cable is pulled -> first connection: {seconds.strip()} s")
        self._say_owner(other)
        self._request(self.outside, "tcp", VIP)
        self.lab.router.ip(f"link set {SEGMENT.name}{len(NODES)} up")

    def _is_handed_over(self) -> bool:
        """Whether both endpoints see the client; not yet in the first ten seconds of a Service."""
        time.sleep(1)
        sources = self._ask(self.outside, "tcp", VIP, PORT, 10)["sources"].values()
        return all(it == [self.outside.v4] for it in sources)

    def _say_owner(self, agent: LabAgent) -> None:
        """Wait until the agent's node answers for the address, and say so.

        Others already say that it does while it still asks whether anybody else answers.
        """

        def answers() -> bool:
            return self._status(agent).addresses.endswith(", 1 owned here")

        wait_until(f"{agent.node.name} answers for {VIP}", answers)
        self.say(f"  {VIP} is answered for by node {agent.node.name}")

    def _status(self, agent: LabAgent) -> status.AgentStatus:
        """Return what the agent, which is ready, has published last."""
        last = status.read(agent.paths)
        assert last
        return last

    def ebpflb(self, *words: str) -> None:
        """Print a command, and its output on the node."""
        self.say(f"  $ ebpflb {' '.join(words)}")
        command = [sys.executable, "-P", "-m", "ebpflb", *words]
        process = self.node.start(command, env={**os.environ, **environment(self.agent.paths)})
        if process.wait():
            raise NodeError(f"`ebpflb {' '.join(words)}` failed")

    def _in_force(self, policy: str) -> bool:
        maps = StateDir(self.agent.paths.state).read_maps()
        found = maps["services"].get(Frontend(ip_address("0.0.0.0"), SHOP_NODEPORT, 6))
        for opened in maps.values():
            opened.close()
        return found is not None and ("local" in found.flags) == (policy == "Local")

    def kill(self) -> None:
        """Kill the agent, and connect."""
        self.agent.stop(signal.SIGKILL)
        self._request(self.client, "tcp", V4)
        self._request(self.client, "udp", V4)

    def close(self) -> None:
        for agent in (self.agent, *self.others):
            agent.close()

    def _start_program(self, host: Host, *words: str) -> "subprocess.Popen[str]":
        """Start traffic.py on a host; return when it is ready."""
        return self.lab.keep_ready(host.python(TRAFFIC, *words, stdout=subprocess.PIPE))

    def _request(
        self,
        host: Host,
        protocol: str,
        address: str,
        port: int = PORT,
        count: int = CONNECTIONS_A_LINE,
    ) -> Any:
        """Connect ``count`` times and print each pod's share. Raises NodeError if one connection
        fails.
        """
        answer = self._ask(host, protocol, address, port, count)
        shares = "  ".join(f"{name} {n / count:.0%}" for name, n in answer["names"].items())
        where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self.say(f"  {host.name:7} {protocol}  {where:18} {shares}")
        if answer["errors"]:
            raise NodeError(f"some of {count} failed: {answer['errors']}")
        return answer

    def _ask(self, host: Host, protocol: str, address: str, port: int, count: int) -> Any:
        """Connect ``count`` times; return what traffic.py says of it."""
        words = ("request", protocol, address, str(port), str(count))
        output, _ = host.python(TRAFFIC, *words, stdout=subprocess.PIPE).communicate()
        return json.loads(output)


def environment(paths: Paths) -> dict[str, str]:
    """Return the variables by which any command of ebpflb finds the demo's node."""
    return {"EBPFLB_STATE_DIR": str(paths.state), "EBPFLB_RUN_DIR": str(paths.run)}


def _shortened(line: str) -> str:
    """Return the line, cut to WIDTH columns."""
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def _slices(pods: list[Host]) -> list[manifests.Manifest]:
    """Return the EndpointSlices of the Service web, for both families."""
    return [
        manifests.endpoint_slice(
            "web",
            family,
            [_endpoint(pod, pod.v4 if family == "IPv4" else pod.v6) for pod in pods],
            TARGETS,
        )
        for family in ("IPv4", "IPv6")
    ]


def _endpoint(pod: Host, address: str) -> manifests.Manifest:
    return manifests.endpoint(address, node="node", target=pod.name)
