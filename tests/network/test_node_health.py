# SPDX-License-Identifier: Apache-2.0
"""A node that is cut off loses its endpoints on the others (docs/endpoint-health.md)."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM
from typing import NamedTuple

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.manifests import Manifest
from ebpflb.model.node_messages import Kind, Message, seal
from ebpflb.model.packet_path import Engine
from tests.kit import load_client, needs
from tests.kit.cluster import VIP
from tests.kit.lab_cluster import NODEPORT, PORT, TARGET, LabCluster, started
from tests.kit.two_nodes import CLUSTER_CIDR

UDP_PORT = 10246
PROMISED = 3.0  # seconds after which no connection is begun to a node that is cut off
LOADED = 2.0  # seconds more on a machine that runs other tests beside
PAUSE, PATIENCE = 0.01, 8.0  # seconds between two connections, and for which each may wait
NAMES = ["one", "two", "three", "four"]


NO_PINGS = """
    table inet pings {
        chain input {
            type filter hook input priority 0;
            icmp type echo-request drop
        }
    }"""


class SetUp(NamedTuple):
    """Without ``pings`` all nodes drop echo requests."""

    engine: Engine = Engine.FLOWS
    pings: bool = True


SETUPS = {str(engine): SetUp(engine) for engine in Engine} | {"no pings": SetUp(pings=False)}


class Nodes(LabCluster):
    """Four nodes with an agent and an endpoint each. Of two clients one is a pod of the first node,
    whose sockets are translated, and one is outside: the first node translates its packets.
    """

    def __init__(self, lab: Lab, folder: Path, set_up: SetUp) -> None:
        super().__init__(lab, folder)
        self.engine = set_up.engine
        key = folder / "key"
        key.write_text("0123456789abcdef")
        options = "--endpoint-health=nodes", f"--node-health-key={key}", *CLUSTER_CIDR
        self.nodes = [lab.node(name, number) for number, name in enumerate(NAMES, 1)]
        self.pods = [lab.pod(node, f"web-{node.name}", 11) for node in self.nodes]
        for number, node in enumerate(self.nodes):
            for other in self.nodes[:number]:
                lab.join(other, node)
            self.add_agent(node, *options)
            if not set_up.pings:
                node.nft(NO_PINGS)
        self.client, self.outside = lab.pod(self.nodes[0], "client", 2), lab.outside("outside", 1)
        for pod in self.pods:
            self.start_program(pod, "serve", pod.name, str(TARGET))

    def services(self) -> list[Manifest]:
        """The Service, and the agents of all nodes as their DaemonSet's Service has them."""
        named = [{"name": "tcp", "port": TARGET, "protocol": "TCP"}]
        pods = [
            manifests.endpoint(pod.v4, node=node.name, target=pod.name)
            for pod, node in zip(self.pods, self.nodes, strict=True)
        ]
        agents = [
            manifests.endpoint(it.v4, node=it.name, target=f"ebpflb-{it.name}") for it in self.nodes
        ]
        asked = [{"name": "nodes", "port": UDP_PORT, "protocol": "UDP"}]
        return [
            manifests.service(
                "web", [VIP], [{**named[0], "port": PORT, "nodePort": NODEPORT}], type="NodePort"
            ),
            manifests.endpoint_slice("web", "IPv4", pods, named),
            manifests.endpoint_slice(
                "ebpflb-nodes", "IPv4", agents, asked, namespace="kube-system"
            ),
        ]

    def known(self) -> bool:
        """Whether the others have answered the first node."""
        return 'ebpflb_nodes{state="answering"} 3.0' in self.metrics()

    def reasons(self) -> dict[str, str]:
        """Pod -> why the first node does not use it; "" if it does."""
        page = json.loads(self.ebpflb("services", "get", "default/web", "-o", "json").stdout)
        (port,) = page["ports"]
        return {row["pod"]: row["reason"] or "" for row in port["endpoints"]}

    def begin_load(self, client: Host, address: str, port: int) -> "subprocess.Popen[str]":
        words = address, str(port), str(PAUSE), str(PATIENCE)
        program = Path(load_client.__file__)
        pipe = subprocess.PIPE
        return self.lab.keep_ready(client.python(program, *words, stdin=pipe, stdout=pipe))


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    set_up = SETUPS[getattr(request, "param", Engine.FLOWS)]
    if set_up.engine is Engine.NETFILTER:
        needs.netfilter()
    with started(lambda lab: Nodes(lab, tmp_path, set_up)) as made:
        made.publish(made.services())
        wait_until("all nodes are known", made.known)
        yield made


def cut(node: Host) -> None:
    """No packet of others reaches the node, and none leaves it."""
    chains = "".join(
        f"chain {hook} {{\ntype filter hook {hook} priority -500; policy drop;\n"
        f'{device} "lo" accept;\n}}\n'
        for hook, device in (("prerouting", "iifname"), ("output", "oifname"))
    )
    node.nft(f"table inet cut {{\n{chains}}}\n")


def failures(load: "subprocess.Popen[str]", began: float) -> list[float]:
    """When connections began that failed, in seconds after the cut.

    Of those that began later than promised each of the other nodes got some. A SYN that the flow
    tables see again goes to another endpoint, so none of theirs may have failed.
    """
    assert load.stdout
    results = [(begun - began, name) for begun, name in json.loads(load.stdout.read())]
    after = {name for begun, name in results if begun > PROMISED + LOADED / 2}
    assert after - {""} == {"web-one", "web-two", "web-three"}
    return [begun for begun, name in results if not name]


def test_strangers_are_dropped_and_counted(cluster: Nodes) -> None:
    """A pod asks an agent, in the right words but without the key, and gets no answer."""
    node = cluster.nodes[0]
    asked = seal(b"not the agents' key", 1, Message(Kind.ASK, 1, 7), 1)
    with cluster.sockets(cluster.client).open(AF_INET, SOCK_DGRAM) as stranger:
        stranger.sendto(asked, (node.v4, UDP_PORT))
        counted = 'ebpflb_node_datagrams_dropped_total{reason="stranger"} 1.0'
        wait_until("it is counted", lambda: counted in cluster.metrics())
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(64)


@pytest.mark.parametrize("cluster", SETUPS, indirect=True)
def test_a_node_that_is_cut_off_costs_the_connections_of_three_seconds(cluster: Nodes) -> None:
    """Two clients are too few to notice a pod by connections, so it is the node that is noticed.

    Another node's agent is paused: it keeps its endpoint, because its kernel answers.
    """
    dead, paused = cluster.nodes[3], cluster.agents[1]
    assert paused.process
    paused.process.send_signal(signal.SIGSTOP)
    node = cluster.nodes[0]
    ways = (cluster.client, VIP, PORT), (cluster.outside, node.v4, NODEPORT)
    loads = [cluster.begin_load(*way) for way in ways]
    cut(dead)
    began = time.monotonic()
    silent = "set aside: its node does not answer (--endpoint-health=nodes)"
    wait_until("it is set aside", lambda: cluster.reasons()["web-four"] == silent)
    reasons = cluster.reasons()
    assert [reasons[f"web-{name}"] for name in NAMES[:3]] == ["", "", ""]
    wait_until("the clients have seen it", lambda: time.monotonic() - began > PROMISED + LOADED)
    for load in loads:
        assert load.stdin
        load.stdin.close()
    failed = [failures(load, began) for load in loads]
    assert failed[0]
    assert max(map(max, filter(None, failed))) < PROMISED + LOADED, failed
    cluster.logs("node four answers neither this node nor the agents that were asked: 1 endpoint")
    assert "node four does not answer" in cluster.ebpflb("history").stdout
    dead.nft("delete table inet cut\n")
    wait_until("it is used again", lambda: not any(cluster.reasons().values()))
    paused.process.send_signal(signal.SIGCONT)
