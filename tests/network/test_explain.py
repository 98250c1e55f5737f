# SPDX-License-Identifier: Apache-2.0
"""``ebpflb explain`` predicts the result of connections, and asking changes nothing. This is tested
for sockets, and for clients whose packets are translated, by both engines.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebpflb.kernel import bpf
from ebpflb.kernel.maps.bpf_map import Counters, CpuArrays, MappedArray
from ebpflb.kernel.node import namespaces
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kit import forked, requests, two_nodes
from tests.kit.cluster import NODEPORT, TARGET, VIP, VIP6, Cluster, endpoint, running, web
from tests.kit.sockets import Sockets


class Said:
    """The command's output and exit status."""

    def __init__(self, done: "subprocess.CompletedProcess[str]") -> None:
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def data(self) -> Any:
        assert self.out, self.err
        return json.loads(self.out)

    def chances(self) -> dict[str, float]:
        return {it["pod"]: it["chance"] for it in self.data["endpoints"] if it["chance"]}


def ask(cluster: Cluster, *words: str, output: str = "json", netns: str | None = None) -> Said:
    """Ask from outside the node's namespace, unless the kernel has no cookies (before 5.14)."""
    if namespaces.cookie(namespaces.OWN_NETNS) is None:
        netns = cluster.node.netns
    return Said(forked.run("explain", *words, *cluster.agent.where, "-o", output, netns=netns))


def contents(cluster: Cluster) -> dict[str, Any]:
    """Return every map, byte for byte, except what changes without a question: effects of other
    packets, such as neighbours', and the agent's notes about sweeps and recently removed endpoints.
    """
    found: dict[str, Any] = {}
    left_out = {"scratch", "moved_flows"}
    maps = {name: it for name, it in cluster.maps.items() if name not in left_out}
    for name, opened in maps.items():
        if name == "flow_gate":
            found[name] = opened.get(0)._replace(empty=0)
        elif isinstance(opened, CpuArrays):
            found[name] = opened.memory[:]
        elif isinstance(opened, Counters):
            size = range(name == "verdicts", min(opened.spec.entries, 64))  # 0: passed
            found[name] = [bpf.map_lookup(opened.fd, opened.key.pack(i), opened.size) for i in size]
        elif isinstance(opened, MappedArray):
            found[name] = opened.memory[:]
        else:
            found[name] = dict(opened.packed_items())
    return found


@pytest.fixture
def cluster(cluster: Cluster) -> Cluster:
    """Yield the usual cluster, which serves two IPv6 endpoints and all IPv4 ones."""
    v6 = [endpoint(pod, v6=True) for pod in cluster.web[:2]]
    cluster.publish(web(*map(endpoint, cluster.web), v6=v6, nodeport=NODEPORT))
    return cluster


@pytest.mark.extended
def test_asking_changes_no_map(cluster: Cluster, pods: list[Host]) -> None:
    """Every map has the same content before and after any question."""
    affinity: dict[str, Any] = {"sessionAffinity": "ClientIP"}
    cluster.publish(web(endpoint(pods[0]), endpoint(pods[1]), nodeport=NODEPORT, **affinity))
    requests.tcp(cluster.sockets(cluster.client), VIP)
    cluster.request(cluster.client, "udp", VIP, 80, 3)
    before = contents(cluster)
    asked = [
        ("node", f"{VIP}:80"),
        ("outside", f"192.0.2.1:{NODEPORT}"),
        (cluster.client.v4, f"{VIP}:80/udp"),
        (cluster.client.v4, f"{VIP}:81/sctp"),
        (pods[0].v4, f"192.0.2.1:{NODEPORT}"),
    ]
    for sender, to in asked:
        assert ask(cluster, to, "--from", sender).status in (0, 4)
    assert contents(cluster) == before


@pytest.mark.parametrize("address", [VIP, VIP6])
def test_each_endpoint_with_its_chance(cluster: Cluster, pod: Sockets, address: str) -> None:
    """The answer has exactly the endpoints that a pod's connections reach, each with the same
    chance.
    """
    to = f"[{address}]:80" if ":" in address else f"{address}:80"
    said = ask(cluster, to, "--from", cluster.client.v6 if ":" in address else cluster.client.v4)
    real = requests.backends(pod, address)
    assert said.status == 0
    assert said.data["verdict"] == "translated"
    assert said.chances().keys() == real.keys()
    assert set(said.chances().values()) == {1 / len(real)}
    (connect,) = (it["what"] for it in said.data["steps"] if it["step"] == "connect")
    assert connect.endswith(f" instead; getpeername() says {to}")


@contextmanager
def unhooked(folder: Path, engine: Engine, *options: str) -> Iterator[tuple[Cluster, Host]]:
    """Yield a cluster with this engine, and a pod whose sockets the hooks do not see."""
    two_nodes.require(engine)
    with running(folder, *options, engine=engine) as made:
        pod = made.lab.pod(made.node, "machine", 9, hooked=False)
        made.publish(web(*map(endpoint, made.web)))
        yield made, pod


def test_an_open_connection(tmp_path: Path) -> None:
    """If the client's port is given, the answer has the endpoint of conntrack's entry."""
    with (
        unhooked(tmp_path, Engine.NETFILTER) as (cluster, pod),
        requests.tcp_socket(cluster.sockets(pod), VIP) as client,
    ):
        client.bind((pod.v4, 40_009))
        client.connect((VIP, 80))
        name = client.recv(64).decode().split()[0]
        (kept,) = [each for each in cluster.web if each.name == name]
        cluster.publish(web(*(endpoint(each) for each in cluster.web if each is not kept)))
        words = ("--from", pod.v4, "--from-port", "40009")
        said = ask(cluster, f"{VIP}:80", *words, netns=cluster.node.netns)
        assert (said.status, said.data["verdict"]) == (0, "established"), said.data
        assert any(kept.v4 in row["what"] for row in said.data["steps"]), said.data


@pytest.mark.extended
@pytest.mark.parametrize("engine", list(Engine))
@pytest.mark.parametrize("options", [(), ("--masquerade-all",)], ids=["client", "masqueraded"])
def test_whom_the_endpoint_sees(tmp_path: Path, engine: Engine, options: tuple[str, ...]) -> None:
    """The answer says that the endpoint sees this node if and only if it does, for a client in a
    pod and for a process of the node, which is never masqueraded.
    """
    with unhooked(tmp_path, engine, *options) as (cluster, pod):
        sockets = cluster.sockets(pod)
        cluster.start_program(cluster.node, "serve", "node", str(TARGET))
        for host in (cluster.web[0], cluster.node):
            cluster.publish(web(endpoint(host)))
            said = ask(cluster, f"{VIP}:80", "--from", pod.v4, netns=cluster.node.netns).data
            answer = requests.tcp(sockets, VIP)
            assert answer.name == host.name
            seen = "the client" if answer.source == pod.v4 else "this node as the client"
            assert said["says"] == f"goes to an endpoint, which sees {seen}", said
