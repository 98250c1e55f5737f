# SPDX-License-Identifier: Apache-2.0
"""``ebpflb explain``: what it says is what connections then do, and asking changes nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpflb.datapath import kernel
from ebpflb.datapath.maps.bpf_map import Counters, CpuArrays, MappedArray
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.errors import NodeError
from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import Sockets
from tests.kit import forked, requests
from tests.kit.cluster import NODEPORT, TARGET, VIP, VIP6, Cluster, endpoint, web

KINDS = {"ClusterIP": (VIP, 80), "NodePort": ("192.0.2.1", NODEPORT)}


class Said:
    """What the command printed and returned."""

    def __init__(self, done: "subprocess.CompletedProcess[str]") -> None:
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def data(self) -> Any:
        assert self.out, self.err
        return json.loads(self.out)

    def chances(self) -> dict[str, float]:
        """By pod."""
        return {it["pod"]: it["chance"] for it in self.data["endpoints"] if it["chance"]}


def ask(cluster: Cluster, *words: str, output: str = "json", netns: str | None = None) -> Said:
    where = [
        "--state-dir",
        str(cluster.agent.paths.state),
        "--run-dir",
        str(cluster.agent.paths.run),
    ]
    return Said(forked.run("explain", *words, *where, "-o", output, netns=netns))


def contents(cluster: Cluster) -> dict[str, Any]:
    """Every map, byte for byte; but not what packets do that are nobody's, as neighbours' are, nor
    what the agent's sweep notes.
    """
    found: dict[str, Any] = {}
    maps = {name: it for name, it in cluster.maps.items() if name != "scratch"}
    for name, opened in maps.items():
        if name == "flow_gate":
            found[name] = opened.get(0)._replace(empty=0)
        elif isinstance(opened, CpuArrays):
            found[name] = opened.memory[:]
        elif isinstance(opened, Counters):
            size = range(name == "verdicts", min(opened.spec.entries, 64))  # 0: passed
            found[name] = [
                kernel.map_lookup(opened.fd, opened.key.pack(i), opened.size) for i in size
            ]
        elif isinstance(opened, MappedArray):
            found[name] = opened.memory[:]
        else:
            found[name] = dict(opened.packed_items())
    return found


@pytest.fixture(autouse=True)
def published(cluster: Cluster, pods: list[Host]) -> Iterator[None]:
    cluster.publish(
        web(
            *(endpoint(pod) for pod in pods),
            v6=[endpoint(pods[0], v6=True), endpoint(pods[1], v6=True)],
            nodeport=NODEPORT,
        )
    )
    yield


@pytest.mark.extended
def test_asking_changes_no_map(cluster: Cluster, pods: list[Host]) -> None:
    """Every map has the same content before and after, whoever asks for whatever."""
    affinity = {"sessionAffinity": "ClientIP"}
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
    """Those that a pod's connections come to, and no others; each has the same chance."""
    to = f"[{address}]:80" if ":" in address else f"{address}:80"
    said = ask(cluster, to, "--from", cluster.client.v6 if ":" in address else cluster.client.v4)
    real = requests.backends(pod, address)
    assert said.status == 0
    assert said.data["verdict"] == "translated"
    assert said.chances().keys() == real.keys()
    assert set(said.chances().values()) == {1 / len(real)}
    assert ("frontend", "services") in {(it["step"], it["map"]) for it in said.data["steps"]}


def test_session_affinity_names_who_is_remembered(cluster: Cluster, pods: list[Host]) -> None:
    """Before a pod's first connection nobody; afterwards the endpoint that all of them get."""
    cluster.publish(web(*map(endpoint, pods), sessionAffinity="ClientIP"))
    asks, sender = cluster.sockets(pods[2]), ("--from", pods[2].v4)
    assert len(ask(cluster, f"{VIP}:80", *sender).chances()) == 3
    first = requests.tcp(asks, VIP).name
    said = ask(cluster, f"{VIP}:80", *sender)
    assert said.chances() == {first: 1.0}
    (row,) = [it for it in said.data["steps"] if it["step"] == "affinity"]
    assert row["map"] == "affinity" and first in row["says"] and "until" in row["says"]
    assert requests.backends(asks, VIP).keys() == {first}


def test_a_node_port_from_outside(cluster: Cluster, pods: list[Host]) -> None:
    """The endpoint of that very port, and as whom the endpoint sees the client."""
    cluster.publish(
        web(endpoint(pods[0]), endpoint(pods[1]), nodeport=NODEPORT, externalTrafficPolicy="Local")
    )
    said = ask(cluster, f"192.0.2.1:{NODEPORT}", "--from", "outside", "--from-port", "40123")
    assert (said.status, said.data["verdict"]) == (0, "translated")
    assert said.chances() == {"web-1": 0.5, "web-2": 0.5}
    steps = [it["step"] for it in said.data["steps"]]
    assert steps[:4] == ["hook", "frontend", "policy", "endpoint"]
    assert {"DNAT", "route", "reply"} <= set(steps)
    assert f"comes from 192.0.2.1:{NODEPORT}" in said.data["steps"][-1]["says"]


def test_a_node_port_of_another_node(cluster: Cluster) -> None:
    """At an address that this node does not have, the answer says where to ask."""
    said = ask(cluster, f"192.0.2.99:{NODEPORT}", netns=cluster.node.netns)
    assert said.status == 3
    where = "192.0.2.99 is no address of this node: run `ebpflb explain` on the node that has it"
    named = f"port {NODEPORT} is a NodePort of default/web:tcp/TCP"
    assert said.data["says"] == f"left alone: {named}, but {where}"


@pytest.mark.parametrize(
    ("spec", "to", "sender", "verdict", "status"),
    [
        ({}, f"{VIP}:81", "client", "refused", 4),
        ({}, "10.96.77.77:80", "client", "unallocated", 5),
        ({}, "9.9.9.9:53/udp", "client", "passed", 3),
        ({"internalTrafficPolicy": "Local"}, f"{VIP}:80", "client", "no_local_endpoint", 5),
    ],
    ids=["other port", "no service", "not ours", "policy Local"],
)
def test_what_gets_no_endpoint(
    cluster: Cluster,
    spec: dict[str, str],
    to: str,
    sender: str,
    verdict: str,
    status: int,
    pods: list[Host],
) -> None:
    """The verdict by its name, and an exit status for scripts."""
    cidr = manifests.service_cidr("10.96.0.0/16", "fd00:96::/112")
    cluster.publish(cidr, web(endpoint(pods[0], node="other"), **spec))
    said = ask(cluster, to, "--from", cluster.client.v4)
    assert (said.data["verdict"], said.status) == (verdict, status), said.data


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((f"{VIP}:80", "--from", "no-such-pod"), "no pod no-such-pod has a process or an endpoint"),
        ((f"{VIP}:80", "--from", "default/web\x1b[31m"), "no pod default/web\\x1b[31m has"),
        ((f"{VIP}:80", "--from", "4194304"), "there is no process 4194304"),
        ((f"{VIP}:80", "--from", "fd00::77"), "fd00::77 is no IPv4 address"),
        (
            (f"{VIP}:80", "--from", "/run/netns/gone"),
            "no network namespace /run/netns/gone: it has gone",
        ),
        ((f"{VIP}",), "is not ADDRESS:PORT[/tcp|udp|sctp]"),
        ((f"{VIP}:80/icmp",), "is not tcp, udp or sctp"),
        ((f"{VIP}:99999",), "port 99999 is not from 1 to 65535"),
    ],
    ids=["pod", "control characters", "PID", "family", "namespace", "port", "protocol", "range"],
)
def test_bad_input_is_one_sentence(cluster: Cluster, words: tuple[str, ...], sentence: str) -> None:
    """What is wrong and what to do, in one line without control characters."""
    said = ask(cluster, *words)
    assert said.status in (1, 2)
    assert sentence in said.err
    assert all(c.isprintable() or c == "\n" for c in said.err)
    assert "Traceback" not in said.err


def test_only_a_network_namespace_is_opened(cluster: Cluster, tmp_path: Path) -> None:
    """A FIFO that no one writes, a device or another kind of namespace: one sentence, at once."""
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    for path in (fifo, link, "/dev/null", tmp_path, f"/proc/{os.getpid()}/ns/mnt"):
        said = ask(cluster, f"{VIP}:80", "--from", str(path))
        assert (said.status, said.err) == (
            1,
            f"ebpflb: no network namespace {path}: it has gone, or never was\n",
        )


def test_an_endpoint_on_another_node(cluster: Cluster, pods: list[Host]) -> None:
    """A pod that runs elsewhere is named with its node."""
    away = endpoint(pods[0], node="other") | {"addresses": ["10.244.9.9"]}
    away["targetRef"] = {"kind": "Pod", "name": "far"}
    cluster.publish(web(away))
    said = ask(cluster, f"{VIP}:80", "--from", "default/far")
    assert said.status == 1
    assert "pod far is not on this node but on other: run `ebpflb explain` there" in said.err


def test_without_rights_or_maps(cluster: Cluster, tmp_path: Path) -> None:
    """One sentence: which capabilities are missing, or that maps are, or are of another version."""
    command = [sys.executable, "-m", "ebpflb", "explain", f"{VIP}:80"]
    poor = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all", *command]
    done = subprocess.run(poor, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "missing capabilities" in done.stderr
    with pytest.raises(NodeError, match=r"no maps of this version in .*: did `ebpflb run`"):
        StateDir(tmp_path).read_maps()
    (tmp_path / "0123456789ab").mkdir()
    with pytest.raises(
        NodeError, match="of another version of ebpflb: use the `ebpflb` of the agent"
    ):
        StateDir(tmp_path).read_maps()


def test_no_agent_is_needed(cluster: Cluster) -> None:
    """The pins suffice; without them the sentence says what to start."""
    cluster.agent.stop()
    try:
        assert ask(cluster, f"{VIP}:80", "--from", cluster.client.v4).status == 0
    finally:
        cluster.agent.start()


def test_eighty_columns_and_pages(cluster: Cluster, pods: list[Host]) -> None:
    """A table of 80 columns; of very many endpoints one page, and how to see the others."""
    many = [
        endpoint(pods[0])
        | {"addresses": [f"10.244.1.{i}"], "targetRef": {"kind": "Pod", "name": f"p{i}"}}
        for i in range(11, 91)
    ]
    cluster.publish(web(*many))
    said = ask(cluster, f"{VIP}:80", "--from", cluster.client.v4, output="table")
    assert max(map(len, said.out.splitlines())) <= 80
    assert said.out.count("slots") <= 23
    assert "page 1 of 4, 80 endpoints: --page" in said.out
    last = ask(cluster, f"{VIP}:80", "--page", "4", output="table")
    assert f":{TARGET}" in last.out and "page 4 of 4" in last.out
